/* Common to the native code: checked arithmetic, arrays from Python, forks, `Then` and `TurnsCalls`. */
#ifndef KVCTL_AGENT_NATIVE_H
#define KVCTL_AGENT_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* A copy of at most this many bytes takes less than 100 us and is done with the GIL held: if the engine's thread runs
 * Python, getting the GIL back takes longer. */
#define HELD_BYTES (256 << 10)

/* What a copy pool runs after each piece, for example what writes it to a peer: an object's attribute `then` has it in a
 * capsule of the name `THEN`, which keeps alive what it needs. */
#define THEN "kvctl_agent.then"
typedef struct {
    void (*run)(void *self, int number, int thread); /* `thread` counts the threads of the pool from 1; 0: the caller's */
    void *self;
} Then;

/* Functions that a wait of the control loop calls in place of Py_BEGIN_ALLOW_THREADS and Py_END_ALLOW_THREADS. The attribute
 * `calls` of a `Turns` is a capsule of the name `TURNS` with them. */
#define TURNS "kvctl_agent.turns"
typedef struct {
    void *(*release)(void *self);
    void (*acquire)(void *self, void *released);
    void *self;
} TurnsCalls;

static inline int64_t clock_ns(clockid_t clock)
{
    struct timespec at;
    clock_gettime(clock, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static inline int64_t now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

/* Adds a product to a sum; returns false if a result does not fit. All arithmetic with numbers from Python is done by this, or
 * on numbers that were checked by this. */
static inline bool add_product(int64_t *sum, int64_t one, int64_t other)
{
    int64_t product;
    return !__builtin_mul_overflow(one, other, &product) && !__builtin_add_overflow(*sum, product, sum);
}

/* Borrows an array in one dimension whose type is one of the letters `formats` (i: int32, lq: int64, LQ: uint64), and returns its
 * length; or returns -1 with an exception that says what it must be. */
static inline Py_ssize_t borrow_numbers(PyObject *object, const char *formats, const char *required, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS))
        return -1;
    const char *format = view->format;
    const Py_ssize_t size = format != NULL && format[0] == 'i' ? sizeof(int32_t) : sizeof(int64_t);
    if (format != NULL && format[0] && !format[1] && strchr(formats, format[0]) && view->itemsize == size && view->ndim == 1 &&
        (uintptr_t)view->buf % size == 0)
        return view->len / size;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_TypeError, "%s, aligned and in one dimension", required);
    return -1;
}

/* How often this process was forked from another since the module was loaded. What was made before the last fork belongs to
 * the parent: its threads do not exist here, and its locks may be held by them. */
static unsigned forks;

static void count_fork(void)
{
    forks++;
}

/* Returns whether forks are counted from now on; otherwise an exception is set. */
static inline bool count_forks(void)
{
    if (!pthread_atfork(NULL, NULL, count_fork))
        return true;
    PyErr_NoMemory();
    return false;
}

#endif
