/* Copies between the pages of a pool and contiguous staging memory, without the GIL.
 *
 * A numpy call copies the pages of one plane of one layer and then needs the GIL again. While the engine's thread runs
 * Python that takes up to 5 ms each time, and between several copying threads it limits the rate to that of two or
 * three. Here a piece of a part is one job whatever it consists of, the threads of a pool never take the GIL, and they
 * wake the control loop by a file descriptor.
 */
#include "common.h"

#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LEAST_COPYING_NS 1000000 /* between two turns of a control loop that copies itself; a turn costs it up to 0.2 ms */
#define MOST_AT_ONCE 64
#define MOST_THREADS 64
/* A considerate pool leaves work to the caller while other threads of the process use these shares of a core and of what
 * the caller or the busiest thread of the pool uses, measured over at least so long. Without an engine they use a tenth
 * of that at most, an engine's busy thread as much, also if many share the cores. */
#define OTHERS_CORE_SHARE 0.1
#define OTHERS_SHARE 0.35
#define SAMPLE_NS 5000000

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

/* Merges heads into rows, rows into pages and transfer pages into pages where they are contiguous. Returns the bytes from the
 * first head to the end of the last page, or -1 if these or those of a page cannot be counted: later products of less are safe. */
static int64_t merge(Plane *plane, int64_t num_slots)
{
    int64_t row_bytes = 0, extent = plane->run_bytes;
    plane->page_bytes = plane->split_stride = 0;
    if (!add_product(&row_bytes, plane->heads, plane->run_bytes) || !add_product(&plane->page_bytes, plane->rows, row_bytes) ||
        !add_product(&plane->split_stride, plane->rows, plane->row_stride) || !add_product(&extent, plane->heads - 1, plane->head_stride) ||
        !add_product(&extent, plane->rows - 1, plane->row_stride) || !add_product(&extent, plane->split - 1, plane->split_stride) ||
        !add_product(&extent, (num_slots - 1) / plane->split, plane->page_stride))
        return -1;
    if (plane->heads == 1 || plane->head_stride == plane->run_bytes) {
        plane->run_bytes = row_bytes;
        plane->heads = 1;
        if (plane->rows == 1 || plane->row_stride == plane->run_bytes) {
            plane->run_bytes = plane->page_bytes;
            plane->rows = 1;
        }
    }
    int64_t split_bytes = 0;
    if (add_product(&split_bytes, plane->split, plane->split_stride) && plane->page_stride == split_bytes) {
        plane->page_stride = plane->split_stride;
        plane->split = 1;
    }
    return extent;
}

typedef struct {
    PyObject_HEAD
    Py_ssize_t layers, planes;
    int64_t num_slots;
    int64_t *blocks; /* [layers][planes]: address of the slice's first head in row 0 of page 0 */
    Plane *plane;
} HeadSlice;

/* Reads a plane that begins at `blocks[0]`, `blocks[planes]`, ...; returns false with an exception. */
static bool read_plane(PyObject *from, Plane *plane, const int64_t *blocks, Py_ssize_t total, Py_ssize_t planes, int64_t num_slots)
{
    long long rows, heads, head_bytes, page, row, head, split;
    if (!PyTuple_Check(from)) {
        PyErr_SetString(PyExc_TypeError, "a plane is a tuple of seven integers");
        return false;
    }
    if (!PyArg_ParseTuple(from, "LLLLLLL", &rows, &heads, &head_bytes, &page, &row, &head, &split))
        return false;
    if (rows < 1 || heads < 1 || head_bytes < 1 || split < 1 || page < 0 || row < 0 || head < 0) {
        PyErr_SetString(PyExc_ValueError, "a plane has rows, heads, bytes and pages, at distances that are not negative");
        return false;
    }
    *plane = (Plane){.rows = rows, .heads = heads, .run_bytes = head_bytes, .row_stride = row, .head_stride = head,
                     .page_stride = page, .split = split};
    int64_t extent = merge(plane, num_slots), end;
    for (Py_ssize_t i = 0; i < total; i += planes) {
        end = blocks[i];
        if (extent < 0 || end <= 0 || !add_product(&end, extent, 1)) {
            PyErr_SetString(PyExc_ValueError, "a plane lies outside the address space");
            return false;
        }
    }
    return true;
}

/* Reads what a HeadSlice is made of; false with an exception. Reading a number may run Python, so `self` is looked at last. */
static bool read_head_slice(HeadSlice *self, PyObject *block_list, PyObject *plane_list, int64_t num_slots)
{
    const Py_ssize_t count = PyTuple_Size(plane_list), total = PyTuple_Size(block_list);
    if (count < 1 || total < 1 || total % count || num_slots < 1) {
        PyErr_SetString(PyExc_ValueError, "blocks must be a multiple of planes, and num_slots positive");
        return false;
    }
    int64_t *blocks = PyMem_Calloc(total, sizeof *blocks);
    Plane *plane = PyMem_Calloc(count, sizeof *plane);
    if (blocks == NULL || plane == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < total && !PyErr_Occurred(); i++)
        blocks[i] = PyLong_AsLongLong(PyTuple_GetItem(block_list, i));
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++)
        read_plane(PyTuple_GetItem(plane_list, i), &plane[i], blocks + i, total - i, count, num_slots);
    if (!PyErr_Occurred() && self->blocks != NULL)
        PyErr_SetString(PyExc_ValueError, "the HeadSlice was initialised before");
    if (PyErr_Occurred()) {
        PyMem_Free(blocks);
        PyMem_Free(plane);
        return false;
    }
    self->layers = total / count;
    self->planes = count;
    self->num_slots = num_slots;
    self->blocks = blocks;
    self->plane = plane;
    return true;
}

static int head_slice_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"blocks", "planes", "num_slots", NULL};
    PyObject *blocks, *planes;
    long long num_slots;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOL", names, &blocks, &planes, &num_slots))
        return -1;
    blocks = PySequence_Tuple(blocks);
    planes = blocks == NULL ? NULL : PySequence_Tuple(planes);
    const bool read = planes != NULL && read_head_slice((HeadSlice *)object, blocks, planes, num_slots);
    Py_XDECREF(blocks);
    Py_XDECREF(planes);
    return read ? 0 : -1;
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
static PyType_Spec head_slice_spec = {"kvctl_agent.native.row_copies.HeadSlice", sizeof(HeadSlice), 0, Py_TPFLAGS_DEFAULT, head_slice_slots};

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
    Py_ssize_t count;
    char *staged;
} Piece;

typedef struct Work {
    struct Work *next; /* in the queue of its pool */
    bool gather, shared, seen;
    int count, taken;  /* pieces; those that a thread has taken */
    _Atomic int left;  /* pieces that are not copied yet */
    bool copying;      /* a call of `Copy.done` copies pieces without the GIL */
    _Atomic bool bad;  /* a page was outside the pool */
    _Atomic int64_t ended_ns, copy_ns;
    int64_t nbytes;
    const Then *then;  /* NULL: nothing */
    Piece *pieces;     /* NULL: nothing is copied */
    Span *spans;
    Py_buffer *arrays; /* page list and staging memory of each piece */
} Work;

/* Frees a copy that no thread has or gets; may be NULL. */
static void free_work(Work *work)
{
    if (work == NULL)
        return;
    for (int i = 0; work->arrays != NULL && i < 2 * work->count; i++)
        PyBuffer_Release(&work->arrays[i]);
    free(work->arrays);
    free(work->spans);
    free(work->pieces);
    free(work);
}

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

/* Returns an item of a page list, which is read once: Python may modify the list meanwhile. */
static inline int64_t page_at(const Piece *piece, int64_t at)
{
    return __atomic_load_n(&piece->pages[at], __ATOMIC_RELAXED);
}

/* Copies one piece; returns false if a page lies outside the pool. */
static bool copy_spans(const Piece *piece, bool gather)
{
    char *staged = piece->staged;
    for (Py_ssize_t i = 0; i < piece->count; i++) {
        const Span *span = &piece->spans[i];
        const Plane plane = *span->plane;
        const bool whole_page = plane.run_bytes == plane.page_bytes;
        const bool runs = whole_page && plane.split == 1 && plane.page_stride == plane.page_bytes;
        for (int64_t at = span->page_lo; at < span->page_hi;) {
            const int64_t page = page_at(piece, at), most = runs ? span->page_hi - at : 1;
            if (page < 0 || page >= piece->num_slots)
                return false;
            int64_t run = 1;
            while (run < most && page_at(piece, at + run) == page + run)
                run++;
            if (run > piece->num_slots - page)
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
    bool ready, closing; /* changed with the GIL */
    unsigned forks;      /* when the pool was made */
    int wanted, threads, wake_fd;
    int numbered, unjoined; /* threads that have their number; that nobody has joined yet */
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

/* Whether this process made the pool. In a child that was forked since, nothing may wait for its lock or its threads, nor
 * copy: the memory may be shared with the parent. */
static bool is_own(const Pool *pool)
{
    return pool->ready && pool->forks == forks;
}

static void run_piece(Pool *pool, Work *work, int number, int thread)
{
    int64_t since = now_ns();
    if (work->pieces != NULL && !work->bad && !copy_piece(&work->pieces[number], work->gather))
        work->bad = true;
    work->copy_ns += now_ns() - since;
    if (work->then != NULL && !work->bad)
        work->then->run(work->then->self, number, thread);
    if (work->pieces == NULL)
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
    const int thread = ++pool->numbered;
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
    return pool->threads && is_own(pool) && !(pool->considerate && others_compute(pool));
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
        PyErr_SetString(PyExc_ValueError, "threads must be from 0 to 64, of a new pool");
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
    self->forks = forks;
    self->considerate = considerate;
    self->wanted = threads;
    return 0;
}

static bool is_open(const Pool *pool)
{
    if (is_own(pool) && !pool->closing)
        return true;
    PyErr_SetString(PyExc_RuntimeError, "the copy pool is closed, or was made before this process was forked; its owner must stop using it first");
    return false;
}

static PyObject *pool_start(PyObject *object, PyObject *unused)
{
    Pool *self = (Pool *)object;
    if (!is_open(self))
        return NULL;
    /* Signals are for the threads of the engine. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = 0;
    for (; self->threads < self->wanted && !failed; self->threads += !failed)
        failed = pthread_create(&self->thread[self->threads], NULL, run_thread, self);
    self->unjoined = self->threads;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* Ends the threads once all copies have ended. Of several callers the first one joins the threads, and the others wait for it. */
static void stop_threads(Pool *self)
{
    if (!is_own(self))
        return;
    const int threads = self->threads;
    pthread_mutex_lock(&self->lock);
    self->closing = true;
    pthread_mutex_unlock(&self->lock);
    self->threads = 0;
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < threads; i++)
        sem_post(&self->queued);
    for (int i = 0; i < threads; i++)
        pthread_join(self->thread[i], NULL);
    pthread_mutex_lock(&self->lock);
    self->unjoined -= threads;
    pthread_cond_broadcast(&self->ended);
    while (self->unjoined)
        pthread_cond_wait(&self->ended, &self->lock);
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
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
    stop_threads(self);
    if (is_own(self)) {
        pthread_cond_destroy(&self->ended);
        sem_destroy(&self->queued);
        pthread_mutex_destroy(&self->lock);
    } else if (self->ready && self->wake_fd >= 0) {
        close(self->wake_fd);
    }
    Py_XDECREF(self->error);
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
        if (!add_product(&nbytes, hi - lo, rows->plane[plane].page_bytes)) {
            PyErr_SetString(PyExc_ValueError, "a piece has more bytes than can be counted");
            return -1;
        }
    }
    return nbytes;
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

/* Returns the copy that `work` is, with what it uses, and queues it for the threads; takes over the work and `kept`, which may
 * be NULL with an exception. What runs Python comes before: it might close the pool. */
static PyObject *start(Pool *self, Work *work, PyObject *kept)
{
    Copy *copy = kept == NULL || !is_open(self) ? NULL : PyObject_New(Copy, copy_type);
    if (copy == NULL) {
        Py_XDECREF(kept);
        free_work(work);
        return NULL;
    }
    Py_INCREF((PyObject *)self);
    copy->pool = self;
    copy->kept = kept;
    copy->work = work;
    if (work->pieces == NULL ? self->threads > 0 : work->nbytes > HELD_BYTES && has_threads(self)) {
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
    int count;
    PyObject *owner;
    const Then *then;
    if (!PyArg_ParseTuple(args, "iO", &count, &owner))
        return NULL;
    PyObject *capsule = read_then(owner, &then);
    if (capsule == NULL)
        return NULL;
    Work *work = NULL;
    if (count < 1 || then == NULL)
        PyErr_SetString(PyExc_ValueError, "there is nothing to run");
    else if ((work = calloc(1, sizeof *work)) == NULL)
        PyErr_NoMemory();
    if (work == NULL) {
        Py_DECREF(capsule);
        return NULL;
    }
    *work = (Work){.count = count, .left = count, .then = then};
    return start((Pool *)object, work, capsule);
}

/* Fills a piece from a job, whose arrays are borrowed until the copy is freed; returns false with an exception. */
static bool read_piece(PyObject *job, Work *work, Piece *piece, Span *spans, Py_buffer *pages, Py_buffer *staged)
{
    PyObject *slice_object = PyTuple_GetItem(job, 0), *of = PyTuple_GetItem(job, 2);
    if (!PyObject_TypeCheck(slice_object, head_slice_type)) {
        PyErr_SetString(PyExc_TypeError, "the first item of a job is a HeadSlice");
        return false;
    }
    HeadSlice *rows = (HeadSlice *)slice_object;
    const Py_ssize_t num_pages = borrow_numbers(PyTuple_GetItem(job, 1), "lq", "pages must be int64", pages);
    const int64_t nbytes = num_pages < 0 ? -1 : read_spans(of, rows, num_pages, spans);
    if (nbytes < 0 || PyObject_GetBuffer(PyTuple_GetItem(job, 3), staged, work->gather ? PyBUF_CONTIG : PyBUF_CONTIG_RO))
        return false;
    *piece = (Piece){.pages = pages->buf, .num_slots = rows->num_slots, .spans = spans, .count = PyTuple_Size(of), .staged = staged->buf};
    if (staged->len >= nbytes && add_product(&work->nbytes, nbytes, 1))
        return true;
    PyErr_Format(PyExc_ValueError, "staging memory of %zd bytes is too small for a piece of %lld bytes", staged->len, (long long)nbytes);
    return false;
}

/* Returns the work of a tuple of jobs, or NULL with an exception. */
static Work *read_jobs(PyObject *jobs, bool gather, const Then *then)
{
    const Py_ssize_t count = PyTuple_Size(jobs);
    Py_ssize_t total = 0;
    if (count < 1 || count > INT32_MAX / 2) {
        PyErr_SetString(PyExc_ValueError, "a copy has at least one piece");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *job = PyTuple_GetItem(jobs, i);
        if (!PyTuple_Check(job) || PyTuple_Size(job) != 4 || !PyTuple_Check(PyTuple_GetItem(job, 2))) {
            PyErr_SetString(PyExc_TypeError, "a job is (rows, pages, spans, staged)");
            return NULL;
        }
        total += PyTuple_Size(PyTuple_GetItem(job, 2));
    }
    Work *work = calloc(1, sizeof *work);
    if (work == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *work = (Work){.gather = gather, .count = (int)count, .left = (int)count, .then = then, .pieces = calloc(count, sizeof(Piece)),
                   .spans = calloc(total + 1, sizeof(Span)), .arrays = calloc(2 * count, sizeof(Py_buffer))};
    bool good = work->pieces != NULL && work->spans != NULL && work->arrays != NULL;
    if (!good)
        PyErr_NoMemory();
    Span *spans = work->spans;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        good = read_piece(PyTuple_GetItem(jobs, i), work, &work->pieces[i], spans, &work->arrays[2 * i], &work->arrays[2 * i + 1]);
        spans += work->pieces[i].count;
    }
    if (good)
        return work;
    free_work(work);
    return NULL;
}

static PyObject *pool_begin(PyObject *object, PyObject *args)
{
    int gather;
    PyObject *list, *owner = Py_None;
    const Then *then;
    if (!PyArg_ParseTuple(args, "pO!|O", &gather, &PyList_Type, &list, &owner))
        return NULL;
    PyObject *jobs = PyList_AsTuple(list), *capsule = jobs == NULL ? NULL : read_then(owner, &then);
    Work *work = capsule == NULL ? NULL : read_jobs(jobs, gather, then);
    PyObject *kept = work == NULL ? NULL : PyTuple_Pack(2, jobs, capsule);
    Py_XDECREF(jobs);
    Py_XDECREF(capsule);
    return start((Pool *)object, work, kept);
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
static PyType_Spec pool_spec = {"kvctl_agent.native.row_copies.Pool", sizeof(Pool), 0, Py_TPFLAGS_DEFAULT, pool_slots};

/* ---- Copy --------------------------------------------------------------------------------------------------------- */

static PyObject *copy_done(PyObject *object, PyObject *unused)
{
    Copy *self = (Copy *)object;
    Work *work = self->work;
    Pool *pool = self->pool;
    if (!is_own(pool)) {
        PyErr_SetString(PyExc_RuntimeError, "the copy was begun before this process was forked");
        return NULL;
    }
    if (!work->shared && work->left && !work->copying) {
        if (work->nbytes <= HELD_BYTES) {
            while (work->left) {
                run_piece(pool, work, work->taken++, 0);
                work->left--;
            }
        } else {
            /* Copies for twice as long as the GIL was last waited for, and at least for `LEAST_COPYING_NS`. */
            int64_t waited = 2 * pool->notice_ns, ended;
            int64_t until = now_ns() + (waited > LEAST_COPYING_NS ? waited : LEAST_COPYING_NS);
            work->copying = true;
            Py_BEGIN_ALLOW_THREADS
            do {
                run_piece(pool, work, work->taken++, 0);
                ended = now_ns();
            } while (--work->left && ended < until);
            Py_END_ALLOW_THREADS
            work->copying = false;
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
    if (work->shared && is_own(pool)) {
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
    free_work(work);
    Py_DECREF(self->kept);
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
    "kvctl_agent.native.row_copies.Copy", sizeof(Copy), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, copy_slots};

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

/* Distances of transfer pages, as addresses.PageSteps. */
typedef struct {
    long long page, split, within;
} PageSteps;

/* Finds the distance of a page from page 0; returns false if it does not fit. */
static bool offset_of(const Py_buffer *pages, Py_ssize_t at, const PageSteps *steps, int64_t *offset)
{
    const int64_t page = pages->itemsize == sizeof(int32_t) ? ((const int32_t *)pages->buf)[at] : ((const int64_t *)pages->buf)[at];
    int64_t whole = page / steps->split, rest = page % steps->split;
    if (rest < 0) { /* as in numpy */
        whole--;
        rest += steps->split;
    }
    *offset = 0;
    return add_product(offset, whole, steps->page) && add_product(offset, rest, steps->within);
}

/* Returns the distance between two offsets; one that does not fit is wrapped, and page_descriptors then refuses the run. */
static int64_t distance(int64_t to, int64_t from)
{
    return (int64_t)((uint64_t)to - (uint64_t)from);
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
        if (i && distance(pairs[i].src, pairs[i - 1].src) == page_bytes && distance(pairs[i].dst, pairs[i - 1].dst) == page_bytes) {
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
        if ((length[read] = borrow_numbers(given[read], read < 2 ? "ilq" : "lq", "pages must be int32 or int64, and addresses int64",
                                           &view[read])) < 0)
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
    bool fits = true;
    for (Py_ssize_t i = 0; i < pages; i++) {
        pairs[i].at = i;
        fits = offset_of(&view[0], i, &from_steps, &pairs[i].src) && offset_of(&view[1], i, &to_steps, &pairs[i].dst) && fits;
    }
    const Py_ssize_t runs = join_pages(pairs, pages, page_bytes, counts);
    int64_t nbytes = 0, *words[3];
    fits = fits && add_product(&nbytes, blocks * (int64_t)sizeof(int64_t), runs);
    for (int i = 0; fits && i < 3; i++) {
        if ((made[i] = PyBytes_FromStringAndSize(NULL, nbytes)) == NULL)
            goto ended;
        words[i] = (int64_t *)PyBytes_AsString(made[i]);
    }
    for (Py_ssize_t block = 0; fits && block < blocks; block++)
        for (Py_ssize_t run = 0; fits && run < runs; run++) {
            int64_t from = local[block], to = remote[block], size = 0;
            fits = add_product(&from, pairs[run].src, 1) && add_product(&to, pairs[run].dst, 1) && add_product(&size, counts[run], page_bytes);
            *words[0]++ = from;
            *words[1]++ = to;
            *words[2]++ = size;
            fits = fits && add_product(&from, size, 1) && add_product(&to, size, 1);
        }
    if (fits)
        found = PyTuple_Pack(3, made[0], made[1], made[2]);
    else
        PyErr_SetString(PyExc_ValueError, "a page lies outside the address space");
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
    PyModuleDef_HEAD_INIT, "row_copies", "Copies of rows without the GIL.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_row_copies(void)
{
    PyObject *created = count_forks() ? PyModule_Create(&module) : NULL;
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
