/* Waits of the control loop without the GIL, after which the engine's thread lends it.
 *
 * Beside a thread that runs Python and releases the GIL often and briefly, as each operator of torch and each recv of an idle
 * scheduler does, a second thread that waits for the GIL gets it after 16 ms at the median: each release wakes it, the other
 * thread takes the GIL again before it runs, and its interval of 5 ms begins anew. Each of these wake-ups also costs the
 * other thread microseconds, and a forward has thousands of releases.
 *
 * Therefore a thread whose wait has ended does not wait for the GIL while the main thread runs. It asks the main thread by
 * `Py_AddPendingCall`, which is called between two bytecodes: there the main thread releases the GIL until the turn is over,
 * at most for `loan_ns`, or longer if the turn waits for a lock that the main thread has. So a turn does not wait for an
 * interval of the interpreter, nor does it wake for releases that are too short. Before Python 3.13 the main thread notices
 * the request when it next takes the GIL back, as an engine does in each operator and each recv. Engines' schedulers run in
 * the main thread; beside other threads, or one that only computes, this is an ordinary wait. */
#include "common.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The main thread reaches its next bytecode within this time, unless it is in a long call. Then it may run without the GIL, and
 * the next time it is asked for a shorter while. */
#define ASK_NS 200000
#define ASK_SHORT_NS 30000
/* A thread that is woken runs after 30 to 50 us; one that looks for as long need not be woken. */
#define SPIN_NS 50000
/* The main thread has nothing else to do during a turn, and most turns take less. */
#define LENDER_SPIN_NS 500000
/* The interpreter gives the GIL to the next thread within microseconds. If it takes longer, a thread runs Python. */
#define LATE_NS 50000
/* Beside a main thread that is not known to run Python a turn yields after so many times `hold_ns`, to find out. */
#define QUIET_HOLDS 4
/* Looks at events of the GPU are this share of the wait so far apart, but not farther than this. */
#define SHARE_OF_WAIT 64
#define LONGEST_PAUSE_NS 200000

enum { NONE, WANTED, LENDING, LENT };

typedef struct {
    PyObject_HEAD
    TurnsCalls calls;
    int64_t loan_ns, hold_ns, pause_ns, spin_ns;
    unsigned forks;
    int state;  /* a futex */
    int asked;  /* whether the main thread has a call of `lend` pending, which has a reference */
    clockid_t main_clock;
    int64_t main_ns, since_ns; /* CPU time of the main thread, and time, when the latest wait began */
    int64_t held_ns; /* when this thread began to keep the GIL from others */
    bool busy;       /* whether the main thread, or another one, ran when the GIL was last acquired */
    bool unanswered; /* whether the main thread ran without an answer to the latest request */
    bool spare;      /* a reference for a call of `lend` is at hand, which is asked for without the GIL */
    long long loans;
} Turns;

static int exiting; /* whether the interpreter ends, which a daemon thread may outlive */

static int load(const int *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void store(int *word, int value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static bool change(int *word, int from, int to)
{
    return __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* Waits while a word has a value, for `limit_ns` at most, the first `spin_ns` of them without sleeping. */
static void wait_while(const int *word, int value, int64_t limit_ns, int64_t spin_ns)
{
    const int64_t since = now_ns();
    for (int64_t waited = 0; load(word) == value && waited < limit_ns; waited = now_ns() - since) {
        if (waited < spin_ns) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            continue;
        }
        const int64_t left = limit_ns - waited;
        const struct timespec at = {left / 1000000000, left % 1000000000};
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &at, NULL, 0);
    }
}

/* Called by the main thread, with the GIL, between two bytecodes. */
static int lend(void *object)
{
    Turns *self = object;
    __atomic_store_n(&self->asked, 0, __ATOMIC_RELEASE);
    if (self->forks == forks && change(&self->state, WANTED, LENDING)) {
        PyThreadState *released = PyEval_SaveThread();
        store(&self->state, LENT);
        wait_while(&self->state, LENT, self->loan_ns, self->spin_ns ? LENDER_SPIN_NS : 0);
        PyEval_RestoreThread(released);
    }
    Py_DECREF((PyObject *)self);
    return 0;
}

static int64_t main_ns(const Turns *self)
{
    return clock_ns(self->main_clock);
}

static void end_loan(Turns *self)
{
    if (load(&self->state) == LENT)
        store(&self->state, NONE);
}

/* Releases the GIL, and ends the loan. */
static void *release(void *object)
{
    Turns *self = object;
    Py_INCREF((PyObject *)self);
    self->spare = true;
    PyThreadState *released = PyEval_SaveThread();
    end_loan(self);
    self->since_ns = now_ns();
    self->main_ns = main_ns(self);
    return released;
}

/* Asks the main thread for the GIL, and waits until it lends it, does not answer, or does not run at all. */
static bool borrow(Turns *self)
{
    if (!change(&self->asked, 0, 1))
        return false; /* it has not answered the last request: it is in a long call */
    const int64_t until = now_ns() + (self->unanswered ? ASK_SHORT_NS : ASK_NS);
    __atomic_store_n(&self->state, WANTED, __ATOMIC_RELEASE);
    self->spare = false;
    if (Py_AddPendingCall(lend, self)) { /* the interpreter's queue is full */
        self->spare = true;
        __atomic_store_n(&self->asked, 0, __ATOMIC_RELEASE);
        return !change(&self->state, WANTED, NONE);
    }
    for (int64_t ran = main_ns(self), left; load(&self->state) == WANTED && (left = until - now_ns()) > 0;) {
        wait_while(&self->state, WANTED, left < ASK_SHORT_NS ? left : ASK_SHORT_NS, self->spin_ns);
        const int64_t runs = main_ns(self);
        if (runs == ran)
            break;
        ran = runs;
    }
    if (change(&self->state, WANTED, NONE))
        return false;
    wait_while(&self->state, LENDING, self->loan_ns, self->spin_ns);
    return true;
}

/* Acquires the GIL that `release` has released. */
static void acquire(void *object, void *released)
{
    Turns *self = object;
    const int64_t ended = now_ns();
    bool lent = false;
    /* A thread that ran Python may still do so, and one that has run for a quarter of the wait may have begun to. */
    const bool runs = self->busy || 4 * (main_ns(self) - self->main_ns) > ended - self->since_ns;
    if (runs && self->forks == forks && !__atomic_load_n(&exiting, __ATOMIC_ACQUIRE))
        lent = borrow(self);
    const int64_t asked = now_ns();
    PyEval_RestoreThread(released);
    const int64_t now = now_ns();
    const bool late = now - asked >= LATE_NS;
    self->unanswered = runs && !lent && !late;
    self->busy = lent || late;
    if (lent || late || ended - self->since_ns >= LATE_NS)
        self->held_ns = now; /* another thread has had the time to take the GIL */
    self->loans += lent;
    if (self->spare) {
        self->spare = false;
        Py_DECREF((PyObject *)self);
    }
}

/* Returns whether an event of the GPU is done, or has failed; `query` is the driver's function that tells the state of one. */
typedef int (*Query)(void *event);
#define NOT_READY 600

static bool any_done(Query query, const uint64_t *events, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (query((void *)(uintptr_t)events[i]) != NOT_READY)
            return true;
    return false;
}

/* Waits until a descriptor is readable, an event is done, a signal comes, or the time is up. A GPU wakes no thread, so its events
 * are looked at after pauses of `pause_ns`, or of a share of the wait so far if that is longer. */
static void wait_for(struct pollfd *polled, Py_ssize_t count, int64_t timeout_ns, Query query, const uint64_t *events,
                     Py_ssize_t event_count, int64_t pause_ns)
{
    const int64_t since = now_ns();
    for (int64_t waited = 0;; waited = now_ns() - since) {
        int64_t left = timeout_ns > waited ? timeout_ns - waited : 0;
        const bool last = !event_count || !left;
        if (!last) {
            int64_t pause = waited / SHARE_OF_WAIT;
            pause = pause > LONGEST_PAUSE_NS ? LONGEST_PAUSE_NS : pause < pause_ns ? pause_ns : pause;
            left = left < pause ? left : pause;
        }
        const struct timespec at = {left / 1000000000, left % 1000000000};
        const int readable = ppoll(polled, count, &at, NULL);
        if (readable < 0)
            for (Py_ssize_t i = 0; i < count; i++)
                polled[i].revents = 0;
        if (readable || last || any_done(query, events, event_count))
            return;
    }
}

/* An empty buffer may have any address. */
static bool is_array(const Py_buffer *buffer, size_t item, size_t alignment)
{
    return !buffer->len || (buffer->len % item == 0 && (uintptr_t)buffer->buf % alignment == 0);
}

static PyObject *turns_wait(PyObject *object, PyObject *args)
{
    Turns *self = (Turns *)object;
    Py_buffer polled, events;
    long long timeout_ns, pause_ns;
    unsigned long long query;
    if (!PyArg_ParseTuple(args, "w*LKy*L", &polled, &timeout_ns, &query, &events, &pause_ns))
        return NULL;
    const bool aligned = is_array(&polled, sizeof(struct pollfd), _Alignof(struct pollfd)) &&
        is_array(&events, sizeof(uint64_t), _Alignof(uint64_t));
    PyObject *ended = NULL;
    if (!aligned || timeout_ns < 0 || pause_ns <= 0 || (events.len && !query)) {
        PyErr_SetString(PyExc_ValueError, "wait takes an array of struct pollfd, a time limit, a function and its events, and a pause");
    } else {
        void *released = release(self);
        wait_for(polled.buf, polled.len / sizeof(struct pollfd), timeout_ns, (Query)(uintptr_t)query, events.buf,
                 events.len / sizeof(uint64_t), pause_ns);
        const int64_t ended_ns = now_ns();
        acquire(self, released);
        ended = PyLong_FromLongLong(ended_ns);
    }
    PyBuffer_Release(&events);
    PyBuffer_Release(&polled);
    return ended;
}

static PyObject *turns_yield(PyObject *object, PyObject *unused)
{
    (void)unused;
    Turns *self = (Turns *)object;
    /* Beside a thread that is not known to run Python the pause is short, and shows whether it does. */
    if (now_ns() - self->held_ns >= (self->busy ? 1 : QUIET_HOLDS) * self->hold_ns) {
        void *released = release(self);
        const struct timespec pause = {0, self->busy ? self->pause_ns : LATE_NS};
        nanosleep(&pause, NULL);
        acquire(self, released);
    }
    Py_RETURN_NONE;
}

static PyObject *turns_end(PyObject *object, PyObject *unused)
{
    (void)unused;
    end_loan((Turns *)object);
    Py_RETURN_NONE;
}

static PyObject *turns_busy(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((Turns *)object)->busy);
}

static PyObject *turns_loans(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(((Turns *)object)->loans);
}

static void release_owner(PyObject *capsule)
{
    Py_DECREF((PyObject *)PyCapsule_GetContext(capsule));
}

static PyObject *turns_calls(PyObject *object, void *unused)
{
    (void)unused;
    PyObject *capsule = PyCapsule_New(&((Turns *)object)->calls, TURNS, NULL);
    if (capsule == NULL || PyCapsule_SetContext(capsule, object) || PyCapsule_SetDestructor(capsule, release_owner)) {
        Py_XDECREF(capsule);
        return NULL;
    }
    Py_INCREF(object); /* the capsule's */
    return capsule;
}

static int turns_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Turns *self = (Turns *)object;
    static char *names[] = {"loan_ns", "hold_ns", "pause_ns", "spins", NULL};
    long long loan_ns, hold_ns, pause_ns;
    int spins;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLLp", names, &loan_ns, &hold_ns, &pause_ns, &spins))
        return -1;
    if (loan_ns <= 0 || hold_ns <= 0 || pause_ns <= 0 || pause_ns >= 1000000000) {
        PyErr_SetString(PyExc_ValueError, "times must be positive, a pause shorter than a second");
        return -1;
    }
    self->calls = (TurnsCalls){release, acquire, self};
    self->loan_ns = loan_ns;
    self->hold_ns = hold_ns;
    self->pause_ns = pause_ns;
    self->spin_ns = spins ? SPIN_NS : 0;
    self->forks = forks;
    /* CPU time of one thread of this process, as Linux numbers these clocks; the main thread has the number of the process. */
    self->main_clock = (clockid_t)((~(unsigned)getpid() << 3) | 6);
    self->held_ns = now_ns();
    return 0;
}

static void turns_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(object);
    Py_DECREF(type);
}

static PyMethodDef turns_methods[] = {
    {"wait", turns_wait, METH_VARARGS,
     "wait(polled, timeout_ns, query, events, pause_ns): waits without the GIL until one of an array of struct pollfd is readable, one of\n"
     "the GPU's events (uint64 handles) is done, which the driver's function at the address query tells, or the time is up. Events are\n"
     "looked at after pauses of at least pause_ns. Returns the monotonic time at which the wait ended, before the thread waited for the GIL."},
    {"yield_if_due", turns_yield, METH_NOARGS, "Lets the main thread run if it does, and the calling thread has had the GIL for long."},
    {"end", turns_end, METH_NOARGS, "Ends the loan; the thread calls it before it ends."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef turns_getset[] = {
    {"busy", turns_busy, NULL, "Whether another thread ran Python when the GIL was last acquired.", NULL},
    {"loans", turns_loans, NULL, "How often the main thread has lent the GIL.", NULL},
    {"calls", turns_calls, NULL, "Capsule of the functions that other native code calls in place of Py_BEGIN_ALLOW_THREADS.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot turns_slots[] = {
    {Py_tp_init, turns_init},
    {Py_tp_dealloc, turns_dealloc},
    {Py_tp_methods, turns_methods},
    {Py_tp_getset, turns_getset},
    {Py_tp_doc, "Turns(loan_ns, hold_ns, pause_ns, spins): the turns of one thread, which calls all methods, at the GIL.\n\n"
                "The main thread lends the GIL for loan_ns at most; a turn yields after hold_ns, for pause_ns. spins: whether there are\n"
                "cores to spare, so that both threads look for each other for a moment before they sleep."},
    {0, NULL},
};
static PyType_Spec turns_spec = {"kvctl_agent.native.turns.Turns", sizeof(Turns), 0, Py_TPFLAGS_DEFAULT, turns_slots};

static PyObject *exit_begins(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    __atomic_store_n(&exiting, 1, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"exit_begins", exit_begins, METH_NOARGS, "Called at the exit of the interpreter: the main thread is asked for nothing from now on."},
    {NULL, NULL, 0, NULL},
};

/* Has the interpreter call `exit_begins` before it ends. */
static bool watch_exit(PyObject *created)
{
    PyObject *function = PyObject_GetAttrString(created, "exit_begins");
    PyObject *atexit = function == NULL ? NULL : PyImport_ImportModule("atexit");
    PyObject *done = atexit == NULL ? NULL : PyObject_CallMethod(atexit, "register", "O", function);
    Py_XDECREF(done);
    Py_XDECREF(atexit);
    Py_XDECREF(function);
    return done != NULL;
}

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "turns", "Waits without the GIL, which the main thread then lends.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_turns(void)
{
    PyObject *created = count_forks() ? PyModule_Create(&module) : NULL;
    if (created == NULL)
        return NULL;
    PyObject *type = PyType_FromSpec(&turns_spec);
    if (type == NULL || PyModule_AddObjectRef(created, "Turns", type) || !watch_exit(created)) {
        Py_XDECREF(type);
        Py_DECREF(created);
        return NULL;
    }
    Py_DECREF(type);
    return created;
}
