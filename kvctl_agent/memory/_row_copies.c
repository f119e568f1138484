/* Copies between the pages of a pool and contiguous staging memory, without the GIL.
 *
 * The native form of the copies of host_copier.py, which stay the reference and the fallback. A numpy call copies the
 * pages of one plane of one layer and then needs the GIL again. While the engine's thread runs Python that takes up to
 * 5 ms each time, and between several copying threads it limits the rate to that of two or three. Here a piece of a part
 * is one job whatever it consists of, the threads of a pool never take the GIL, and they wake the control loop by a file
 * descriptor.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* A copy of at most this many bytes takes less than 100 us and is done with the GIL held: if the engine's thread runs
 * Python, getting the GIL back takes longer. */
#define HELD_BYTES (256 << 10)
#define LEAST_COPYING_NS 1000000 /* between two turns of a control loop that copies itself; a turn costs it up to 0.2 ms */
#define MOST_AT_ONCE 64
#define MOST_THREADS 64
/* A considerate pool leaves work to the caller while other threads of the process use these shares of a core and of what
 * the caller or the busiest thread of the pool uses, measured over at least so long. Without an engine they use a tenth
 * of that at most, an engine's busy thread as much, also if many share the cores. */
#define OTHERS_CORE_SHARE 0.1
#define OTHERS_SHARE 0.35
#define SAMPLE_NS 5000000

static int64_t clock_ns(clockid_t clock)
{
    struct timespec at;
    clock_gettime(clock, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static int64_t now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

/* ---- HeadSlice: the addresses of some heads in every block of a segment ------------------------------------------- */

typedef struct {
    int64_t rows, heads; /* runs of a page: contiguous heads of a row are one, and so are contiguous rows of a page */
    int64_t run_bytes;
    int64_t row_stride, head_stride;
    int64_t page_bytes; /* of the slice in one page, without gaps */
    int64_t page_stride;
    int64_t split; /* transfer pages in a page of the engine; `page_stride` is that of the engine's pages */
    int64_t split_stride;
} Plane;

/* Merges heads into rows, rows into pages and transfer pages into pages where they are contiguous. */
static void merge(Plane *plane)
{
    plane->page_bytes = plane->rows * plane->heads * plane->run_bytes;
    plane->split_stride = plane->rows * plane->row_stride;
    if (plane->heads == 1 || plane->head_stride == plane->run_bytes) {
        plane->run_bytes *= plane->heads;
        plane->heads = 1;
        if (plane->rows == 1 || plane->row_stride == plane->run_bytes) {
            plane->run_bytes *= plane->rows;
            plane->rows = 1;
        }
    }
    if (plane->page_stride == plane->split * plane->split_stride) {
        plane->page_stride = plane->split_stride;
        plane->split = 1;
    }
}

typedef struct {
    PyObject_HEAD
    Py_ssize_t layers, planes;
    int64_t num_slots;
    uint64_t *blocks; /* [layers][planes]: address of the slice's first head in row 0 of page 0 */
    Plane *plane;
} HeadSlice;

static int head_slice_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    HeadSlice *self = (HeadSlice *)object;
    static char *names[] = {"blocks", "planes", "num_slots", NULL};
    PyObject *blocks, *planes;
    long long num_slots;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!L", names, &PyList_Type, &blocks, &PyList_Type, &planes, &num_slots))
        return -1;
    Py_ssize_t count = PyList_Size(planes), total = PyList_Size(blocks);
    if (self->blocks != NULL || count < 1 || total < 1 || total % count || num_slots < 1) {
        PyErr_SetString(PyExc_ValueError, "blocks must be a multiple of planes, and num_slots positive");
        return -1;
    }
    self->blocks = PyMem_Calloc(total, sizeof *self->blocks);
    self->plane = PyMem_Calloc(count, sizeof *self->plane);
    if (self->blocks == NULL || self->plane == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < total; i++) {
        self->blocks[i] = PyLong_AsUnsignedLongLong(PyList_GetItem(blocks, i));
        if (PyErr_Occurred())
            return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long long rows, heads, head_bytes, page, row, head, split;
        if (!PyArg_ParseTuple(PyList_GetItem(planes, i), "LLLLLLL", &rows, &heads, &head_bytes, &page, &row, &head, &split))
            return -1;
        if (rows < 1 || heads < 1 || head_bytes < 1 || split < 1) {
            PyErr_SetString(PyExc_ValueError, "a plane has rows, heads, bytes and pages");
            return -1;
        }
        self->plane[i] = (Plane){.rows = rows, .heads = heads, .run_bytes = head_bytes, .row_stride = row,
                                 .head_stride = head, .page_stride = page, .split = split};
        merge(&self->plane[i]);
    }
    self->layers = total / count;
    self->planes = count;
    self->num_slots = num_slots;
    return 0;
}

static void head_slice_dealloc(PyObject *object)
{
    HeadSlice *self = (HeadSlice *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->blocks);
    PyMem_Free(self->plane);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyType_Slot head_slice_slots[] = {
    {Py_tp_init, head_slice_init},
    {Py_tp_dealloc, head_slice_dealloc},
    {Py_tp_doc, "Addresses and strides of some heads in every block of a segment."},
    {0, NULL},
};
static PyType_Spec head_slice_spec = {"kvctl_agent.memory._row_copies.HeadSlice", sizeof(HeadSlice), 0, Py_TPFLAGS_DEFAULT, head_slice_slots};

/* ---- one copy ---------------------------------------------------------------------------------------------------- */

typedef struct {
    char *block;
    const Plane *plane;
    int64_t page_lo, page_hi;
} Span;

typedef struct {
    const int64_t *pages;
    int64_t num_slots;
    const Span *spans;
    int count;
    char *staged;
} Piece;

/* What runs after each piece, for example what writes it to a peer: an object's attribute `then` has it in a capsule, which
 * keeps alive what it needs. */
#define THEN "kvctl_agent.then"
typedef struct {
    void (*run)(void *self, int number, int thread); /* `thread` counts the threads of the pool from 1; 0: the caller's */
    void *self;
} Then;

typedef struct Work {
    struct Work *next; /* in the queue of its pool */
    bool gather, shared, seen;
    int count, taken;  /* pieces; those that a thread has taken */
    _Atomic int left;  /* pieces that are not copied yet */
    _Atomic bool bad;  /* a page was outside the pool */
    _Atomic int64_t ended_ns, copy_ns;
    int64_t nbytes;
    const Then *then; /* NULL: nothing */
    Piece *pieces;
    Span *spans;
} Work;

/* Copies into a pool, past the caches: the lines that are overwritten are not read first, which takes half the time of a
 * scatter, and what is in the caches stays there. A piece of staging memory is written through them, since it is read
 * next. `store_fence` must follow before others are told. */
static inline void store(char *to, const char *from, int64_t nbytes)
{
#ifdef __SSE2__
    if ((((uintptr_t)to | (uintptr_t)nbytes) & 63) == 0) {
        for (const char *end = from + nbytes; from < end; from += 64, to += 64) {
            const __m128i *line = (const __m128i *)from;
            __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
            __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
            __m128i *into = (__m128i *)to;
            _mm_stream_si128(into, a);
            _mm_stream_si128(into + 1, b);
            _mm_stream_si128(into + 2, c);
            _mm_stream_si128(into + 3, d);
        }
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

static inline void store_fence(void)
{
#ifdef __SSE2__
    _mm_sfence();
#endif
}

/* Copies one piece; returns false if a page lies outside the pool. */
static bool copy_spans(const Piece *piece, bool gather)
{
    char *staged = piece->staged;
    for (int i = 0; i < piece->count; i++) {
        const Span *span = &piece->spans[i];
        const Plane plane = *span->plane;
        const bool whole_page = plane.run_bytes == plane.page_bytes;
        const bool runs = whole_page && plane.split == 1 && plane.page_stride == plane.page_bytes;
        for (int64_t at = span->page_lo; at < span->page_hi;) {
            const int64_t page = piece->pages[at];
            int64_t run = 1;
            while (runs && at + run < span->page_hi && piece->pages[at + run] == page + run)
                run++;
            if (page < 0 || page + run > piece->num_slots)
                return false;
            char *pool = span->block;
            if (plane.split == 1)
                pool += page * plane.page_stride;
            else
                pool += page / plane.split * plane.page_stride + page % plane.split * plane.split_stride;
            if (whole_page) {
                const int64_t nbytes = run * plane.page_bytes;
                gather ? (void)memcpy(staged, pool, nbytes) : store(pool, staged, nbytes);
                staged += run * plane.page_bytes;
            } else {
                for (int64_t row = 0; row < plane.rows; row++, pool += plane.row_stride) {
                    char *part = pool;
                    for (int64_t head = 0; head < plane.heads; head++, part += plane.head_stride, staged += plane.run_bytes)
                        gather ? (void)memcpy(staged, part, plane.run_bytes) : store(part, staged, plane.run_bytes);
                }
            }
            at += run;
        }
    }
    return true;
}

static bool copy_piece(const Piece *piece, bool gather)
{
    bool good = copy_spans(piece, gather);
    store_fence();
    return good;
}

/* ---- Pool: threads that copy -------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    pthread_mutex_t lock;
    pthread_cond_t ended;
    sem_t queued; /* posted once for each piece of a copy, at most once for each thread */
    Work *first, **last;
    bool ready, closing;
    int wanted, threads, running, wake_fd;
    pthread_t thread[MOST_THREADS];
    PyObject *error;
    _Atomic int64_t notice_ns; /* how long the control loop takes to notice that a copy has ended */
    _Atomic int64_t piece_ns;  /* how long one thread takes for a piece */
    bool considerate, others_compute;
    int64_t sampled_ns, all_ns, used_ns[MOST_THREADS + 1]; /* time and CPU times at the last sample; used_ns[0]: the caller's */
} Pool;

typedef struct {
    PyObject_HEAD
    Pool *pool;
    PyObject *kept; /* the objects whose memory the copy uses, and the capsule of `then` */
    Work *work;
} Copy;

static PyTypeObject *head_slice_type, *copy_type;

static void run_piece(Pool *pool, Work *work, int number, int thread)
{
    int64_t since = now_ns();
    if (!work->bad && !copy_piece(&work->pieces[number], work->gather))
        work->bad = true;
    work->copy_ns += now_ns() - since;
    if (work->then != NULL && !work->bad)
        work->then->run(work->then->self, number, thread);
    if (work->spans == NULL)
        return;
    int64_t known = pool->piece_ns, took = now_ns() - since;
    pool->piece_ns = known ? known + (took - known) / 8 : took;
}

static void wake(Pool *pool)
{
    uint64_t one = 1;
    while (write(pool->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void *run_thread(void *argument)
{
    Pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    const int thread = ++pool->running;
    for (;;) {
        Work *work = pool->first;
        if (work == NULL) {
            if (pool->closing)
                break;
            pthread_mutex_unlock(&pool->lock);
            sem_wait(&pool->queued); /* may return for a piece that another thread has taken, or after a signal: then it waits again */
            pthread_mutex_lock(&pool->lock);
            continue;
        }
        int number = work->taken++;
        if (work->taken == work->count) {
            pool->first = work->next;
            if (pool->first == NULL)
                pool->last = &pool->first;
        }
        pthread_mutex_unlock(&pool->lock);
        run_piece(pool, work, number, thread);
        pthread_mutex_lock(&pool->lock);
        if (work->left == 1) {
            work->ended_ns = now_ns();
            work->left = 0; /* from here the owner may free `work` once it gets the lock */
            wake(pool);
            pthread_cond_broadcast(&pool->ended);
        } else {
            work->left--;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Returns by how much a thread's CPU time has grown since the last sample. */
static int64_t used_since(Pool *pool, int thread, clockid_t clock)
{
    int64_t before = pool->used_ns[thread];
    pool->used_ns[thread] = clock_ns(clock);
    return pool->used_ns[thread] - before;
}

/* Whether threads that are neither the caller nor the pool's compute, such as an engine's; with the GIL. */
static bool others_compute(Pool *pool)
{
    const int64_t now = now_ns(), passed = now - pool->sampled_ns;
    if (passed < SAMPLE_NS)
        return pool->others_compute;
    int64_t ours = used_since(pool, 0, CLOCK_THREAD_CPUTIME_ID), busiest = ours;
    for (int i = 0; i < pool->threads; i++) {
        clockid_t clock;
        if (pthread_getcpuclockid(pool->thread[i], &clock))
            continue;
        const int64_t used = used_since(pool, i + 1, clock);
        busiest = used > busiest ? used : busiest;
        ours += used;
    }
    const int64_t all = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    const double others = all - pool->all_ns - ours;
    pool->all_ns = all;
    pool->sampled_ns = now;
    pool->others_compute = others > OTHERS_CORE_SHARE * passed && others > OTHERS_SHARE * busiest;
    return pool->others_compute;
}

static bool has_threads(Pool *pool)
{
    return pool->threads && !(pool->considerate && others_compute(pool));
}

static int pool_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Pool *self = (Pool *)object;
    static char *names[] = {"threads", "wake_fd", "error", "considerate", NULL};
    int threads, wake_fd, considerate;
    PyObject *error;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiOp", names, &threads, &wake_fd, &error, &considerate))
        return -1;
    if (self->ready || threads < 0 || threads > MOST_THREADS) {
        PyErr_SetString(PyExc_ValueError, "threads must be from 0 to 64");
        return -1;
    }
    /* The owner may close its descriptor before the pool. */
    self->wake_fd = fcntl(wake_fd, F_DUPFD_CLOEXEC, 0);
    if (self->wake_fd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    pthread_mutex_init(&self->lock, NULL);
    sem_init(&self->queued, 0, 0);
    pthread_cond_init(&self->ended, NULL);
    self->last = &self->first;
    Py_INCREF(error);
    self->error = error;
    self->ready = true;
    self->considerate = considerate;
    self->wanted = threads;
    return 0;
}

static PyObject *pool_start(PyObject *object, PyObject *unused)
{
    Pool *self = (Pool *)object;
    if (!self->ready || self->closing) {
        PyErr_SetString(PyExc_ValueError, "the copy pool is closed");
        return NULL;
    }
    /* Signals are for the threads of the engine. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = 0;
    for (; self->threads < self->wanted && !failed; self->threads += !failed)
        failed = pthread_create(&self->thread[self->threads], NULL, run_thread, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static void stop_threads(Pool *self)
{
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    self->closing = true;
    pthread_mutex_unlock(&self->lock);
    for (int i = 0; i < self->threads; i++)
        sem_post(&self->queued);
    for (int i = 0; i < self->threads; i++)
        pthread_join(self->thread[i], NULL);
    Py_END_ALLOW_THREADS
    self->threads = 0;
    if (self->wake_fd >= 0)
        close(self->wake_fd);
    self->wake_fd = -1;
}

static PyObject *pool_close(PyObject *object, PyObject *unused)
{
    stop_threads((Pool *)object);
    Py_RETURN_NONE;
}

static void pool_dealloc(PyObject *object)
{
    Pool *self = (Pool *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->ready) {
        stop_threads(self);
        pthread_cond_destroy(&self->ended);
        sem_destroy(&self->queued);
        pthread_mutex_destroy(&self->lock);
        Py_DECREF(self->error);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

/* Reads the spans of a piece, checks them, and returns the number of bytes they have, or -1 with an exception. */
static int64_t read_spans(PyObject *spans, const HeadSlice *rows, int64_t num_pages, Span *into)
{
    int64_t nbytes = 0;
    Py_ssize_t count = PyTuple_Size(spans);
    for (Py_ssize_t i = 0; i < count; i++) {
        long long layer, plane, lo, hi;
        PyObject *span = PyTuple_GetItem(spans, i);
        if (!PyTuple_Check(span) || !PyArg_ParseTuple(span, "LLLL", &layer, &plane, &lo, &hi)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a span is a tuple of four integers");
            return -1;
        }
        if (layer < 0 || layer >= rows->layers || plane < 0 || plane >= rows->planes || lo < 0 || lo >= hi || hi > num_pages) {
            PyErr_Format(PyExc_ValueError, "span (%lld, %lld, %lld, %lld) lies outside the %zd layers of this rank or the %lld pages of the part",
                         layer, plane, lo, hi, rows->layers, (long long)num_pages);
            return -1;
        }
        into[i] = (Span){(char *)rows->blocks[layer * rows->planes + plane], &rows->plane[plane], lo, hi};
        nbytes += (hi - lo) * rows->plane[plane].page_bytes;
    }
    return nbytes;
}

static bool is_open(const Pool *pool)
{
    if (pool->ready && !pool->closing)
        return true;
    PyErr_SetString(PyExc_ValueError, "the copy pool is closed; its owner must stop copying before closing it");
    return false;
}

/* Returns the capsule of what is to run after each piece, or None for nothing; NULL with an exception. */
static PyObject *read_then(PyObject *owner, const Then **then)
{
    *then = NULL;
    if (owner == Py_None) {
        Py_INCREF(owner);
        return owner;
    }
    PyObject *capsule = PyObject_GetAttrString(owner, "then");
    if (capsule == NULL)
        return NULL;
    *then = PyCapsule_GetPointer(capsule, THEN);
    if (*then == NULL)
        Py_CLEAR(capsule);
    return capsule;
}

/* Returns the copy that `work` is, with what it uses, and queues it for the threads; takes over the work and `kept`. */
static PyObject *start(Pool *self, Work *work, PyObject *kept)
{
    Copy *copy = kept == NULL ? NULL : PyObject_New(Copy, copy_type);
    if (copy == NULL) {
        Py_XDECREF(kept);
        free(work->spans);
        free(work->pieces);
        free(work);
        return NULL;
    }
    Py_INCREF((PyObject *)self);
    copy->pool = self;
    copy->kept = kept;
    copy->work = work;
    if (work->spans == NULL ? self->threads > 0 : work->nbytes > HELD_BYTES && has_threads(self)) {
        work->shared = true;
        pthread_mutex_lock(&self->lock);
        *self->last = work;
        self->last = &work->next;
        pthread_mutex_unlock(&self->lock);
        /* Wakes no more threads than there are pieces: each costs this thread microseconds, with the GIL. A semaphore, because
         * glibc before 2.41 may lose a signal of a condition variable (bug 25847). */
        for (int i = 0; i < work->count && i < self->threads; i++)
            sem_post(&self->queued);
    }
    return (PyObject *)copy;
}

static PyObject *pool_run(PyObject *object, PyObject *args)
{
    Pool *self = (Pool *)object;
    int count;
    PyObject *owner;
    const Then *then;
    if (!PyArg_ParseTuple(args, "iO", &count, &owner) || !is_open(self))
        return NULL;
    PyObject *capsule = read_then(owner, &then);
    if (capsule == NULL)
        return NULL;
    if (count < 1 || then == NULL) {
        Py_DECREF(capsule);
        PyErr_SetString(PyExc_ValueError, "there is nothing to run");
        return NULL;
    }
    Work *work = calloc(1, sizeof *work);
    Piece *pieces = calloc(count, sizeof *pieces); /* without spans: nothing is copied */
    if (work == NULL || pieces == NULL) {
        Py_DECREF(capsule);
        free(pieces);
        free(work);
        return PyErr_NoMemory();
    }
    *work = (Work){.count = count, .left = count, .pieces = pieces, .then = then};
    return start(self, work, capsule);
}

static PyObject *pool_begin(PyObject *object, PyObject *args)
{
    Pool *self = (Pool *)object;
    int gather;
    PyObject *jobs, *owner = Py_None;
    const Then *then;
    if (!PyArg_ParseTuple(args, "pO!|O", &gather, &PyList_Type, &jobs, &owner) || !is_open(self))
        return NULL;
    Py_ssize_t count = PyList_Size(jobs), total = 0;
    if (count < 1 || count > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a copy has at least one piece");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *job = PyList_GetItem(jobs, i);
        if (!PyTuple_Check(job) || PyTuple_Size(job) != 4 || !PyTuple_Check(PyTuple_GetItem(job, 2))) {
            PyErr_SetString(PyExc_TypeError, "a job is (rows, pages, spans, staged)");
            return NULL;
        }
        total += PyTuple_Size(PyTuple_GetItem(job, 2));
    }
    PyObject *capsule = read_then(owner, &then);
    if (capsule == NULL)
        return NULL;
    Work *work = calloc(1, sizeof *work);
    Piece *pieces = calloc(count, sizeof *pieces);
    Span *spans = calloc(total, sizeof *spans);
    if (work == NULL || pieces == NULL || spans == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    *work = (Work){.gather = gather, .count = (int)count, .left = (int)count, .pieces = pieces, .spans = spans, .then = then};
    Span *next = spans;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *job = PyList_GetItem(jobs, i), *slice_object = PyTuple_GetItem(job, 0), *of = PyTuple_GetItem(job, 2);
        if (!PyObject_TypeCheck(slice_object, head_slice_type)) {
            PyErr_SetString(PyExc_TypeError, "the first item of a job is a HeadSlice");
            goto failed;
        }
        HeadSlice *rows = (HeadSlice *)slice_object;
        /* The arrays stay alive and in place while `kept` refers to them: numpy does not resize arrays that it lends,
         * and the callers neither modify nor resize them. */
        Py_buffer pages, staged;
        if (PyObject_GetBuffer(PyTuple_GetItem(job, 1), &pages, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS))
            goto failed;
        bool wide = pages.itemsize == sizeof(int64_t) && pages.ndim == 1 && pages.format != NULL && strchr("lq", pages.format[0]);
        pieces[i] = (Piece){.pages = pages.buf, .num_slots = rows->num_slots, .spans = next, .count = (int)PyTuple_Size(of)};
        int64_t num_pages = pages.len / (Py_ssize_t)sizeof(int64_t);
        PyBuffer_Release(&pages);
        if (!wide) {
            PyErr_SetString(PyExc_TypeError, "pages must be int64 in one dimension");
            goto failed;
        }
        int64_t nbytes = read_spans(of, rows, num_pages, next);
        if (nbytes < 0 || PyObject_GetBuffer(PyTuple_GetItem(job, 3), &staged, gather ? PyBUF_CONTIG : PyBUF_CONTIG_RO))
            goto failed;
        pieces[i].staged = staged.buf;
        int64_t available = staged.len;
        PyBuffer_Release(&staged);
        if (available < nbytes) {
            PyErr_Format(PyExc_ValueError, "staging memory of %lld bytes is too small for a piece of %lld bytes",
                         (long long)available, (long long)nbytes);
            goto failed;
        }
        work->nbytes += nbytes;
        next += pieces[i].count;
    }
    PyObject *copied = PyList_AsTuple(jobs), *kept = copied == NULL ? NULL : PyTuple_Pack(2, copied, capsule);
    Py_XDECREF(copied);
    Py_DECREF(capsule);
    return start(self, work, kept);
failed:
    Py_DECREF(capsule);
    free(spans);
    free(pieces);
    free(work);
    return NULL;
}

static void noticed(Pool *pool, int64_t ns)
{
    int64_t known = pool->notice_ns;
    pool->notice_ns = ns > known ? ns : known - known / 8;
}

/* The number of pieces for which copying takes at least twice as long as noticing its end. */
static PyObject *pool_pieces_at_once(PyObject *object, void *unused)
{
    Pool *self = (Pool *)object;
    int64_t least = self->threads > 1 ? self->threads : 1, piece_ns = self->piece_ns;
    int64_t wanted = piece_ns ? 2 * self->notice_ns * least / piece_ns : 0;
    return PyLong_FromLongLong(wanted < least ? least : wanted > MOST_AT_ONCE ? MOST_AT_ONCE : wanted);
}

static PyMethodDef pool_methods[] = {
    {"begin", pool_begin, METH_VARARGS,
     "begin(gather, jobs, owner=None): begins a copy of pieces (rows, pages, spans, staged), after each of which owner.then runs."},
    {"run", pool_run, METH_VARARGS, "run(count, owner): runs owner.then `count` times, on the threads if there are any."},
    {"start", pool_start, METH_NOARGS, "Starts the threads."},
    {"close", pool_close, METH_NOARGS, "Finishes the copies that have begun and ends the threads; idempotent."},
    {NULL, NULL, 0, NULL},
};

static PyObject *pool_has_threads(PyObject *object, void *unused)
{
    return PyBool_FromLong(has_threads((Pool *)object));
}

static PyGetSetDef pool_getset[] = {
    {"has_threads", pool_has_threads, NULL, "Whether threads may copy now; of a considerate pool, not while others compute.", NULL},
    {"pieces_at_once", pool_pieces_at_once, NULL, "Number of pieces to begin at once for the best rate.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot pool_slots[] = {
    {Py_tp_init, pool_init},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_getset},
    {Py_tp_doc, "Threads that copy without the GIL and wake the control loop; without threads, `Copy.done` copies."},
    {0, NULL},
};
static PyType_Spec pool_spec = {"kvctl_agent.memory._row_copies.Pool", sizeof(Pool), 0, Py_TPFLAGS_DEFAULT, pool_slots};

/* ---- Copy --------------------------------------------------------------------------------------------------------- */

static PyObject *copy_done(PyObject *object, PyObject *unused)
{
    Copy *self = (Copy *)object;
    Work *work = self->work;
    Pool *pool = self->pool;
    if (!work->shared && work->left) {
        if (work->nbytes <= HELD_BYTES) {
            while (work->left) {
                run_piece(pool, work, work->taken++, 0);
                work->left--;
            }
        } else {
            /* Copies for twice as long as the GIL was last waited for, and at least for `LEAST_COPYING_NS`. */
            int64_t waited = 2 * pool->notice_ns, ended;
            int64_t until = now_ns() + (waited > LEAST_COPYING_NS ? waited : LEAST_COPYING_NS);
            Py_BEGIN_ALLOW_THREADS
            do {
                run_piece(pool, work, work->taken++, 0);
                ended = now_ns();
            } while (--work->left && ended < until);
            Py_END_ALLOW_THREADS
            noticed(pool, now_ns() - ended);
        }
    }
    if (work->left)
        Py_RETURN_FALSE;
    if (work->shared && !work->seen) {
        work->seen = true;
        noticed(pool, now_ns() - work->ended_ns);
    }
    if (work->bad) {
        PyErr_SetString(pool->error, "a page lies outside the pool: the page list was modified while it was copied");
        return NULL;
    }
    Py_RETURN_TRUE;
}

static void copy_dealloc(PyObject *object)
{
    Copy *self = (Copy *)object;
    PyTypeObject *type = Py_TYPE(object);
    Work *work = self->work;
    Pool *pool = self->pool;
    if (work->shared) {
        /* Also if `left` is 0: a thread may still hold the lock in which it set it. */
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&pool->lock);
        for (Work **at = &pool->first; *at != NULL; at = &(*at)->next) {
            if (*at != work)
                continue;
            *at = work->next;
            if (pool->last == &work->next)
                pool->last = at;
            work->left -= work->count - work->taken;
            break;
        }
        while (work->left)
            pthread_cond_wait(&pool->ended, &pool->lock);
        pthread_mutex_unlock(&pool->lock);
        Py_END_ALLOW_THREADS
    }
    free(work->spans);
    free(work->pieces);
    free(work);
    Py_XDECREF(self->kept);
    Py_DECREF(pool);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef copy_methods[] = {
    {"done", copy_done, METH_NOARGS, "Returns whether the copy has ended; without threads, copies a part of it."},
    {NULL, NULL, 0, NULL},
};
static PyObject *copy_copy_ns(PyObject *object, void *unused)
{
    return PyLong_FromLongLong(((Copy *)object)->work->copy_ns);
}

static PyGetSetDef copy_getset[] = {
    {"copy_ns", copy_copy_ns, NULL, "Time that threads have spent copying, all together.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot copy_slots[] = {
    {Py_tp_getset, copy_getset},
    {Py_tp_dealloc, copy_dealloc},
    {Py_tp_methods, copy_methods},
    {Py_tp_doc, "A copy in progress."},
    {0, NULL},
};
static PyType_Spec copy_spec = {
    "kvctl_agent.memory._row_copies.Copy", sizeof(Copy), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, copy_slots};

/* ---- Descriptors of page runs --------------------------------------------------------------------------------------- */

typedef struct {
    int64_t src, dst;
    Py_ssize_t at;
} PagePair;

static int by_source(const void *one, const void *other)
{
    const PagePair *a = one, *b = other;
    if (a->src != b->src)
        return a->src < b->src ? -1 : 1;
    return a->at < b->at ? -1 : 1;
}

/* Borrows an array of int64, or of int32 if these are pages, in one dimension; returns its length, or -1 with an exception. */
static Py_ssize_t read_numbers(PyObject *object, bool pages, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS))
        return -1;
    const bool wide = view->itemsize == sizeof(int64_t), narrow = pages && view->itemsize == sizeof(int32_t);
    if ((wide || narrow) && view->ndim == 1 && view->format != NULL && strchr(wide ? "lq" : "il", view->format[0]))
        return view->len / view->itemsize;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "pages must be int32 or int64, and addresses int64, in one dimension");
    return -1;
}

/* Distances of transfer pages, as addresses.PageSteps. */
typedef struct {
    long long page, split, within;
} PageSteps;

/* Returns the distance of a page from page 0. The products are unsigned, because any page index must be defined behaviour. */
static int64_t offset_of(const Py_buffer *pages, Py_ssize_t at, const PageSteps *steps)
{
    const int64_t page = pages->itemsize == sizeof(int32_t) ? ((const int32_t *)pages->buf)[at] : ((const int64_t *)pages->buf)[at];
    int64_t whole = page / steps->split, rest = page % steps->split;
    if (rest < 0) { /* as in numpy */
        whole--;
        rest += steps->split;
    }
    return (int64_t)((uint64_t)whole * (uint64_t)steps->page + (uint64_t)rest * (uint64_t)steps->within);
}

/* Pairs the pages, in the order of their sources, and joins adjacent ones; returns the number of runs. */
static Py_ssize_t join_pages(PagePair *pairs, Py_ssize_t pages, int64_t page_bytes, int64_t *counts)
{
    for (Py_ssize_t i = 1; i < pages; i++)
        if (pairs[i].src < pairs[i - 1].src) {
            qsort(pairs, pages, sizeof *pairs, by_source);
            break;
        }
    Py_ssize_t runs = 0;
    for (Py_ssize_t i = 0; i < pages; i++) {
        if (i && pairs[i].src - pairs[i - 1].src == page_bytes && pairs[i].dst - pairs[i - 1].dst == page_bytes) {
            counts[runs - 1]++;
        } else {
            pairs[runs] = pairs[i]; /* runs <= i: pages that are still to be compared are not overwritten */
            counts[runs++] = 1;
        }
    }
    return runs;
}

static PyObject *page_descriptors(PyObject *module_object, PyObject *args)
{
    PyObject *given[4], *found = NULL, *made[3] = {NULL, NULL, NULL};
    long long page_bytes;
    PageSteps from_steps, to_steps;
    if (!PyArg_ParseTuple(args, "OO(LLL)(LLL)LOO", &given[0], &given[1], &from_steps.page, &from_steps.split, &from_steps.within,
                          &to_steps.page, &to_steps.split, &to_steps.within, &page_bytes, &given[2], &given[3]))
        return NULL;
    Py_buffer view[4];
    Py_ssize_t length[4];
    int read = 0;
    for (; read < 4; read++)
        if ((length[read] = read_numbers(given[read], read < 2, &view[read])) < 0)
            break;
    PagePair *pairs = NULL;
    int64_t *counts = NULL;
    if (read < 4)
        goto ended;
    const Py_ssize_t pages = length[0], blocks = length[2];
    if (length[1] != pages || length[3] != blocks || page_bytes <= 0 || from_steps.split <= 0 || to_steps.split <= 0) {
        PyErr_SetString(PyExc_ValueError, "source and destination differ in number, or a page has no bytes or no transfer page");
        goto ended;
    }
    pairs = calloc(pages + 1, sizeof *pairs);
    counts = calloc(pages + 1, sizeof *counts);
    if (pairs == NULL || counts == NULL) {
        PyErr_NoMemory();
        goto ended;
    }
    const int64_t *local = view[2].buf, *remote = view[3].buf;
    for (Py_ssize_t i = 0; i < pages; i++)
        pairs[i] = (PagePair){offset_of(&view[0], i, &from_steps), offset_of(&view[1], i, &to_steps), i};
    const Py_ssize_t runs = join_pages(pairs, pages, page_bytes, counts);
    for (int i = 0; i < 3; i++)
        if ((made[i] = PyBytes_FromStringAndSize(NULL, blocks * runs * (Py_ssize_t)sizeof(int64_t))) == NULL)
            goto ended;
    int64_t *from = (int64_t *)PyBytes_AsString(made[0]), *to = (int64_t *)PyBytes_AsString(made[1]);
    int64_t *sizes = (int64_t *)PyBytes_AsString(made[2]);
    for (Py_ssize_t block = 0; block < blocks; block++)
        for (Py_ssize_t run = 0; run < runs; run++) {
            *from++ = local[block] + pairs[run].src;
            *to++ = remote[block] + pairs[run].dst;
            *sizes++ = counts[run] * page_bytes;
        }
    found = PyTuple_Pack(3, made[0], made[1], made[2]);
ended:
    for (int i = 0; i < 3; i++)
        Py_XDECREF(made[i]);
    while (read > 0)
        PyBuffer_Release(&view[--read]);
    free(pairs);
    free(counts);
    return found;
}

static PyMethodDef functions[] = {
    {"page_descriptors", page_descriptors, METH_VARARGS,
     "page_descriptors(src, dst, src_steps, dst_steps, page_bytes, local, remote): joins pages that are adjacent on both sides, and returns\n"
     "for each of the blocks whose addresses are given the addresses of each run and its bytes, three arrays of 64 bits as bytes; with\n"
     "the GIL held. Steps are (bytes between pages, transfer pages in a page, bytes between these)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_row_copies", "Copies of rows without the GIL.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__row_copies(void)
{
    PyObject *created = PyModule_Create(&module);
    if (created == NULL)
        return NULL;
    PyObject *pool_type = PyType_FromSpec(&pool_spec);
    head_slice_type = (PyTypeObject *)PyType_FromSpec(&head_slice_spec);
    copy_type = (PyTypeObject *)PyType_FromSpec(&copy_spec);
    if (pool_type == NULL || head_slice_type == NULL || copy_type == NULL || PyModule_AddObjectRef(created, "Pool", pool_type) ||
        PyModule_AddObjectRef(created, "HeadSlice", (PyObject *)head_slice_type)) {
        Py_DECREF(created);
        return NULL;
    }
    Py_DECREF(pool_type);
    return created;
}
