/* Requests of one write over NIXL, made, posted and polled without the GIL; and the wait for tags.
 *
 * NIXL's binding takes and releases the GIL in every call, so a write costs four such calls for each of its requests;
 * beside an engine's thread that runs Python each may wait for 5 ms. Here a thread of the copy pool makes and posts a
 * request as soon as it has gathered the bytes (`then`), and one call polls all requests of a write.
 *
 * NIXL's headers are not needed: descriptor lists and options are made by its C interface, libnixl_capi.so of the wheel,
 * and the methods that run per request are called by their names in libnixl.so. The pointer to the agent comes
 * from pybind11's conduit, which refuses it to an extension of another C++ ABI.
 */
#include "common.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <exception>
#include <memory>
#include <poll.h>
#include <sched.h>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kSuccess = 0, kInProgress = 1, kBackend = -3; /* nixl_status_t */
constexpr int kHostMemory = 0, kDeviceMemory = 1, kWriteOperation = 1; /* DRAM_SEG, VRAM_SEG, NIXL_WRITE */
constexpr int kHost = -1;                                  /* in place of the number of a GPU */
constexpr size_t kHeldDescriptors = 16; /* as HELD_BYTES, of memory of a GPU, whose copies are only begun: 4 us each */
constexpr int64_t kLongestLingerNs = 1000000000;

/* ---- Library: the functions of NIXL -------------------------------------------------------------------------------- */

using Tags = std::unordered_map<std::string, std::vector<std::string>>; /* nixl_notifs_t: by the sender's name */
struct DescriptorList { void *list; }; /* nixl_capi_xfer_dlist_s: points to the list of libnixl.so */

struct Functions {
    int (*create_list)(int memory, DescriptorList **);
    int (*destroy_list)(DescriptorList *);
    int (*add)(DescriptorList *, uintptr_t, size_t, uint64_t device);
    int (*create_options)(void **); /* nixl_capi_opt_args_s: begins with the options of libnixl.so */
    int (*destroy_options)(void *);
    int (*set_tag)(void *, const void *, size_t);
    int (*set_has_tag)(void *, bool);
    int (*set_parameter)(void *, const void *, size_t);
    int (*create)(const void *agent, const int &operation, const void *local, const void *remote, const std::string &peer,
                  void *&request, const void *options);
    int (*post)(const void *agent, void *request, const void *options);
    int (*status)(const void *agent, void *request);
    int (*release)(const void *agent, void *request);
    int (*tags)(void *agent, Tags &, const void *options);
    int (*tell)(const void *agent, const std::string &peer, const std::string &tag, const void *options);
};

struct Symbol {
    const char *name;
    size_t offset;
};

#define MEMBER(name) offsetof(Functions, name)
const Symbol kSymbols[] = {
    {"nixl_capi_create_xfer_dlist", MEMBER(create_list)},
    {"nixl_capi_destroy_xfer_dlist", MEMBER(destroy_list)},
    {"nixl_capi_xfer_dlist_add_desc", MEMBER(add)},
    {"nixl_capi_create_opt_args", MEMBER(create_options)},
    {"nixl_capi_destroy_opt_args", MEMBER(destroy_options)},
    {"nixl_capi_opt_args_set_notif_msg", MEMBER(set_tag)},
    {"nixl_capi_opt_args_set_has_notif", MEMBER(set_has_tag)},
    {"nixl_capi_opt_args_set_custom_param", MEMBER(set_parameter)},
    {"_ZNK9nixlAgent13createXferReqERK14nixl_xfer_op_tRK12nixlDescListI13nixlBasicDescES7_RKNSt7__cxx1112basic_stringIcSt11char_"
     "traitsIcESaIcEEERP12nixlXferReqHPK21nixlAgentOptionalArgs",
     MEMBER(create)},
    {"_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs", MEMBER(post)},
    {"_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH", MEMBER(status)},
    {"_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH", MEMBER(release)},
    {"_ZN9nixlAgent9getNotifsERSt13unordered_mapINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESt6vectorIS6_SaIS6_EESt4hashIS6_"
     "ESt8equal_toIS6_ESaISt4pairIKS6_S9_EEEPK21nixlAgentOptionalArgs",
     MEMBER(tags)},
    {"_ZNK9nixlAgent8genNotifERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES7_PK21nixlAgentOptionalArgs", MEMBER(tell)},
};

/* What pybind11 compares types by: the name behind the pointer to the table of virtual functions. */
struct TypeInfo {
    const void *table;
    const char *name;
} nixl_agent_type = {nullptr, "9nixlAgent"};

struct Library {
    PyObject_HEAD
    Functions functions;
    void *agent;
    PyObject *owner; /* NIXL's Python object of the agent */
    unsigned forks;  /* when it was opened */
};

bool is_open(const Library *library)
{
    return library->owner != nullptr && library->forks == forks;
}

int library_init(PyObject *object, PyObject *args, PyObject *)
{
    Library *self = reinterpret_cast<Library *>(object);
    const char *path, *abi;
    PyObject *agent;
    if (!PyArg_ParseTuple(args, "syO", &path, &abi, &agent))
        return -1;
    /* Never closed: libraries of NIXL stay loaded with its binding. */
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        PyErr_SetString(PyExc_OSError, dlerror());
        return -1;
    }
    Functions functions;
    for (const Symbol &symbol : kSymbols) {
        void *found = dlsym(handle, symbol.name);
        if (found == nullptr) {
            PyErr_Format(PyExc_OSError, "%s has no function %s", path, symbol.name);
            return -1;
        }
        std::memcpy(reinterpret_cast<char *>(&functions) + symbol.offset, &found, sizeof found);
    }
    PyObject *type = PyCapsule_New(&nixl_agent_type, "St9type_info", nullptr);
    if (type == nullptr)
        return -1;
    PyObject *pointer = PyObject_CallMethod(agent, "_pybind11_conduit_v1_", "yOy", abi, type, "raw_pointer_ephemeral");
    Py_DECREF(type);
    if (pointer == nullptr)
        return -1;
    void *found = pointer == Py_None ? nullptr : PyCapsule_GetPointer(pointer, nixl_agent_type.name);
    Py_DECREF(pointer);
    if (found == nullptr) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_OSError, "NIXL's binding has another C++ ABI");
        return -1;
    }
    if (self->owner != nullptr) { /* looked at last: the call above runs Python */
        PyErr_SetString(PyExc_ValueError, "the library is open");
        return -1;
    }
    Py_INCREF(agent);
    self->functions = functions;
    self->agent = found;
    self->forks = forks;
    self->owner = agent;
    return 0;
}

void library_dealloc(PyObject *object)
{
    Library *self = reinterpret_cast<Library *>(object);
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->owner);
    freefunc release = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
    release(object);
    Py_DECREF(type);
}

constexpr int64_t kLongestPauseNs = 1000000;

/* Looks for tags, at once and after pauses of `pause_ns`, or of 1 / `share` of the wait so far if that is longer, until there are some,
 * NIXL fails, a descriptor is readable, a signal comes, or the time is up. The descriptors are always polled, too. */
int wait_for_tags(const Library *library, pollfd *polled, size_t count, int64_t timeout_ns, int64_t pause_ns, int64_t share,
                   Tags &tags) noexcept
{
    int64_t since = now_ns();
    for (;;) {
        int status = kBackend;
        try {
            status = library->functions.tags(library->agent, tags, nullptr);
        } catch (...) {
        }
        int64_t waited = now_ns() - since, left = timeout_ns - waited, pause = 0;
        bool ended = status != kSuccess || !tags.empty() || left <= 0;
        if (!ended)
            pause = std::min(left, std::max(pause_ns, std::min(waited / share, kLongestPauseNs)));
        timespec at = {time_t(pause / 1000000000), long(pause % 1000000000)};
        int readable = ppoll(polled, count, &at, nullptr);
        if (readable < 0)
            for (size_t i = 0; i < count; i++)
                polled[i].revents = 0;
        if (readable || ended)
            return status;
    }
}

/* Returns {sender: [tag, ...]}. */
PyObject *dict_of(const Tags &tags)
{
    PyObject *found = PyDict_New();
    for (const auto &[sender, sent] : tags) {
        PyObject *name = found == nullptr ? nullptr : PyUnicode_DecodeUTF8(sender.data(), sender.size(), "surrogateescape");
        PyObject *list = name == nullptr ? nullptr : PyList_New(0);
        bool made = list != nullptr && !PyDict_SetItem(found, name, list);
        for (size_t i = 0; made && i < sent.size(); i++) {
            PyObject *tag = PyBytes_FromStringAndSize(sent[i].data(), sent[i].size());
            made = tag != nullptr && !PyList_Append(list, tag);
            Py_XDECREF(tag);
        }
        Py_XDECREF(list);
        Py_XDECREF(name);
        if (!made) {
            Py_XDECREF(found);
            return nullptr;
        }
    }
    return found;
}

PyObject *send_tag(PyObject *object, PyObject *args, bool held)
{
    Library *self = reinterpret_cast<Library *>(object);
    const char *peer, *tag;
    Py_ssize_t tag_bytes;
    if (!PyArg_ParseTuple(args, "sy#", &peer, &tag, &tag_bytes))
        return nullptr;
    if (!is_open(self)) {
        PyErr_SetString(PyExc_ValueError, "the library is not open, or was opened before this process was forked");
        return nullptr;
    }
    int status = kBackend;
    PyThreadState *released = held ? nullptr : PyEval_SaveThread();
    try {
        status = self->functions.tell(self->agent, peer, std::string(tag, tag_bytes), nullptr);
    } catch (...) {
    }
    if (released != nullptr)
        PyEval_RestoreThread(released);
    return PyLong_FromLong(status);
}

/* With the GIL held, because it takes microseconds: threads that post share NIXL's lock, and have other workers of UCX. */
PyObject *library_tell(PyObject *object, PyObject *args)
{
    return send_tag(object, args, true);
}

/* The first tag connects UCX to the peer, which takes 2 ms. */
PyObject *library_reach(PyObject *object, PyObject *args)
{
    return send_tag(object, args, false);
}

PyObject *library_wait(PyObject *object, PyObject *args)
{
    Library *self = reinterpret_cast<Library *>(object);
    Py_buffer polled;
    long long timeout_ns, pause_ns, share;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "w*LLLO", &polled, &timeout_ns, &pause_ns, &share, &capsule))
        return nullptr;
    const TurnsCalls *turns = static_cast<TurnsCalls *>(PyCapsule_GetPointer(capsule, TURNS));
    if (turns == nullptr) {
        PyBuffer_Release(&polled);
        return nullptr;
    }
    PyObject *found = nullptr;
    const bool polls = polled.len % sizeof(pollfd) == 0 && reinterpret_cast<uintptr_t>(polled.buf) % alignof(pollfd) == 0;
    if (!is_open(self) || !polls || pause_ns <= 0 || share <= 0) {
        PyErr_SetString(PyExc_ValueError, "wait takes an array of struct pollfd, a pause and a share, and needs an open library");
    } else {
        Tags tags;
        int64_t ended_ns;
        void *released = turns->release(turns->self);
        const int status = wait_for_tags(self, static_cast<pollfd *>(polled.buf), polled.len / sizeof(pollfd),
                                         std::max(timeout_ns, 0LL), pause_ns, share, tags);
        ended_ns = now_ns();
        turns->acquire(turns->self, released);
        if (PyObject *by_sender = dict_of(tags))
            found = Py_BuildValue("(NLi)", by_sender, static_cast<long long>(ended_ns), status);
    }
    PyBuffer_Release(&polled);
    return found;
}

/* ---- Requests ------------------------------------------------------------------------------------------------------- */

enum State : int {
    kWaiting, /* not posted yet */
    kPosting,
    kPosted,
    kDone,
    kFailed,
    kSkipped, /* not posted, because the time limit had passed or the write was stopped */
};

struct Request {
    size_t first, end; /* descriptors */
    std::string tag;   /* "": none */
    std::atomic<int> state{kWaiting};
    void *handle = nullptr;
};

struct Write {
    Functions call;
    const void *agent;
    std::string peer;
    std::vector<uint64_t> local, remote, sizes; /* descriptors */
    std::vector<Request> requests;
    std::atomic<bool> stopped{false};
    std::atomic<int64_t> until_ns{0}, post_ns{0};
    std::atomic<int> error{0}; /* status of the first request that failed */
    std::atomic<size_t> posted{0};
    std::atomic_flag polling = ATOMIC_FLAG_INIT;
    std::atomic<bool> lingering{false};
    int64_t linger_ns = 0; /* how long the thread that posts the last request polls all */
    int threads = 0;       /* of the pool that have workers of their own */
    int64_t bytes = 0;
    int here = kHost, there = kHost; /* the devices of the local and of the remote memory */
    Then then;

    explicit Write(size_t count) : requests(count) {}

    static int memory_of(int device) noexcept { return device == kHost ? kHostMemory : kDeviceMemory; }

    /* Whether posts and polls take less than 100 us. */
    bool held() const noexcept
    {
        return here == kHost && there == kHost ? bytes <= HELD_BYTES : requests.back().end <= kHeldDescriptors;
    }

    int make(Request &request, int worker) noexcept
    {
        DescriptorList *from = nullptr, *to = nullptr;
        void *options = nullptr;
        int status = kBackend;
        try {
            bool made = !call.create_options(&options);
            if (made && !request.tag.empty())
                made = !call.set_tag(options, request.tag.data(), request.tag.size()) && !call.set_has_tag(options, true);
            if (made && threads) {
                const std::string parameter = "worker_id=" + std::to_string(worker);
                made = !call.set_parameter(options, parameter.data(), parameter.size());
            }
            made = made && !call.create_list(memory_of(here), &from) && !call.create_list(memory_of(there), &to);
            const uint64_t local_device = std::max(here, 0), remote_device = std::max(there, 0);
            for (size_t i = request.first; made && i < request.end; i++)
                made = !call.add(from, local[i], sizes[i], local_device) && !call.add(to, remote[i], sizes[i], remote_device);
            if (made)
                status = call.create(agent, kWriteOperation, from->list, to->list, peer, request.handle, options);
        } catch (...) {
        }
        if (from != nullptr)
            call.destroy_list(from);
        if (to != nullptr)
            call.destroy_list(to);
        if (options != nullptr)
            call.destroy_options(options);
        return status;
    }

    /* Frees the request in NIXL. */
    void end(Request &request, int status) noexcept
    {
        if (request.handle != nullptr) {
            try { /* NIXL may call a request to a peer that has just died active, and keeps its memory */
                call.release(agent, request.handle);
            } catch (...) {
            }
            request.handle = nullptr;
        }
        if (status < 0) {
            int none = 0;
            error.compare_exchange_strong(none, status);
        }
        request.state = status < 0 ? kFailed : kDone;
    }

    /* Makes and posts a request; between host memories of one host, this copies the bytes.
     *
     * Every thread of a pool has a worker of UCX for itself: a post has the lock of its worker while it copies. NIXL would
     * take workers in turns for new threads, so that the control loop, which sends tags, could share one and spin for
     * milliseconds. It gets worker 1, and 0 is for all who post without a pool.
     *
     * Does nothing unless the request is in state `from`: of several threads, one posts it. */
    void run(size_t number, int thread, int from) noexcept
    {
        Request &request = requests[number];
        if (!request.state.compare_exchange_strong(from, kPosting)) /* before `stopped` is read: see `poll` */
            return;
        int64_t since = now_ns();
        if (stopped || since > until_ns) {
            request.state = kSkipped;
            return;
        }
        int status = make(request, thread && thread <= threads ? thread + 1 : 0);
        if (status == kSuccess) {
            try {
                status = call.post(agent, request.handle, nullptr);
            } catch (...) {
                status = kBackend;
            }
        }
        if (status == kInProgress)
            request.state = kPosted;
        else
            end(request, status);
        post_ns += now_ns() - since;
        if (++posted == requests.size())
            linger();
    }

    /* Polls until all requests have ended, or for `linger_ns`: the target usually acknowledges a write within 100 us, and
     * then the control loop has nothing to poll, for which it would wait for the GIL once more. */
    void linger() noexcept
    {
        if (!linger_ns || bytes <= HELD_BYTES)
            return;
        lingering = true;
        int64_t until = now_ns() + linger_ns;
        while (!stopped && poll() && now_ns() < until)
            sched_yield();
        lingering = false;
    }

    /* Whether all requests are posted and some have not ended. */
    bool in_flight() const noexcept
    {
        bool found = false;
        for (const Request &request : requests) {
            int state = request.state;
            if (state == kPosting || (state == kWaiting && !stopped))
                return false;
            found |= state == kPosted;
        }
        return found;
    }

    /* Polls the requests in flight; returns the number of requests that have not ended. Of a stopped write, a request that
     * waits has ended, because a thread that takes it from now on skips it.
     *
     * With `ask` false NIXL is not called: a call waits while a thread that posts has a lock of UCX, for milliseconds. */
    size_t poll(bool ask = true) noexcept
    {
        size_t left = 0;
        if (polling.test_and_set(std::memory_order_acquire))
            return 1; /* another thread ends requests now */
        for (Request &request : requests) {
            int state = request.state;
            if (state == kPosted && ask) {
                int status = kBackend;
                try {
                    status = call.status(agent, request.handle);
                } catch (...) {
                }
                if (status == kInProgress)
                    left++;
                else
                    end(request, status);
            } else if (state == kPosted || state == kPosting || ((state == kWaiting || state == kSkipped) && !stopped)) {
                left++;
            }
        }
        polling.clear(std::memory_order_release);
        return left;
    }
};

struct Requests {
    PyObject_HEAD
    PyObject *library;
    Write *write;
    unsigned forks; /* when they were made: a child does not call NIXL */
};

PyTypeObject *library_type;

void run_number(void *self, int number, int thread)
{
    Write *write = static_cast<Write *>(self);
    if (number >= 0 && size_t(number) < write->requests.size())
        write->run(number, thread, kWaiting);
}

/* Reads an array of uint64; returns false with an exception. */
bool read_array(PyObject *object, std::vector<uint64_t> &into)
{
    Py_buffer view;
    const Py_ssize_t count = borrow_numbers(object, "LQ", "addresses and sizes must be uint64", &view);
    if (count < 0)
        return false;
    std::unique_ptr<Py_buffer, decltype(&PyBuffer_Release)> borrowed(&view, PyBuffer_Release);
    const uint64_t *first = static_cast<const uint64_t *>(view.buf);
    into.assign(first, first + count);
    return true;
}

/* Whether memory that begins at `address` ends in the address space. */
bool is_addressable(uint64_t address, uint64_t size)
{
    int64_t end = address;
    return end >= 0 && int64_t(size) >= 0 && add_product(&end, size, 1);
}

/* Divides `count` descriptors among the requests of a write; returns false with an exception. */
bool divide(Write *write, size_t count, PyObject *ends, PyObject *tags)
{
    size_t first = 0;
    for (size_t i = 0; i < write->requests.size(); i++) {
        Request &request = write->requests[i];
        char *tag;
        Py_ssize_t tag_bytes;
        PyObject *number = PyList_GetItem(ends, i), *sent = PyList_GetItem(tags, i); /* null if Python has modified the lists */
        size_t end = number == nullptr || sent == nullptr ? 0 : PyLong_AsSize_t(number);
        if (PyErr_Occurred() || PyBytes_AsStringAndSize(sent, &tag, &tag_bytes))
            return false;
        if (end <= first || end > count) {
            PyErr_SetString(PyExc_ValueError, "every request has descriptors");
            return false;
        }
        request.first = first;
        request.end = first = end;
        request.tag.assign(tag, tag_bytes);
    }
    if (first != count) {
        PyErr_SetString(PyExc_ValueError, "every descriptor belongs to a request");
        return false;
    }
    return true;
}

/* Fills a write from the arguments of Requests; returns false with an exception. */
bool fill(Write *write, PyObject *local, PyObject *remote, PyObject *sizes, PyObject *ends, PyObject *tags)
{
    if (!read_array(local, write->local) || !read_array(remote, write->remote) || !read_array(sizes, write->sizes))
        return false;
    const size_t count = write->sizes.size();
    if (write->local.size() != count || write->remote.size() != count) {
        PyErr_SetString(PyExc_ValueError, "local and remote descriptors and sizes differ in number");
        return false;
    }
    for (size_t i = 0; i < count; i++)
        if (const uint64_t size = write->sizes[i];
            !is_addressable(write->local[i], size) || !is_addressable(write->remote[i], size) || !add_product(&write->bytes, size, 1)) {
            PyErr_SetString(PyExc_ValueError, "a descriptor lies outside the address space");
            return false;
        }
    return divide(write, count, ends, tags);
}

int requests_init(PyObject *object, PyObject *args, PyObject *)
{
    Requests *self = reinterpret_cast<Requests *>(object);
    PyObject *library, *local, *remote, *sizes, *ends, *tags;
    const char *peer;
    long long until_ns, linger_ns;
    int here, there, threads;
    if (!PyArg_ParseTuple(args, "O!sOOO(ii)O!O!LLi", library_type, &library, &peer, &local, &remote, &sizes, &here, &there,
                          &PyList_Type, &ends, &PyList_Type, &tags, &until_ns, &linger_ns, &threads))
        return -1;
    Library *of = reinterpret_cast<Library *>(library);
    Py_ssize_t count = PyList_Size(ends);
    if (!is_open(of) || count < 1 || count > INT32_MAX || PyList_Size(tags) != count) {
        PyErr_SetString(PyExc_ValueError, "a write has at least one request, each with a tag, and an open library");
        return -1;
    }
    if (linger_ns < 0 || linger_ns > kLongestLingerNs || threads < 0 || here < kHost || there < kHost) {
        PyErr_SetString(PyExc_ValueError, "threads and devices are numbers, and linger_ns is at most a second");
        return -1;
    }
    try {
        auto write = std::make_unique<Write>(count);
        write->peer = peer;
        write->call = of->functions;
        write->agent = of->agent;
        write->until_ns = until_ns;
        write->linger_ns = linger_ns;
        write->threads = threads;
        write->here = here;
        write->there = there;
        write->then = {run_number, write.get()};
        if (!fill(write.get(), local, remote, sizes, ends, tags))
            return -1;
        if (self->write != nullptr) { /* looked at last: arrays may run Python */
            PyErr_SetString(PyExc_ValueError, "the requests were made before");
            return -1;
        }
        self->write = write.release();
    } catch (const std::exception &) {
        PyErr_NoMemory();
        return -1;
    }
    Py_INCREF(library);
    self->library = library;
    self->forks = forks;
    return 0;
}

void requests_dealloc(PyObject *object)
{
    Requests *self = reinterpret_cast<Requests *>(object);
    PyTypeObject *type = Py_TYPE(object);
    if (self->write != nullptr && self->forks == forks)
        for (Request &request : self->write->requests)
            self->write->end(request, kSuccess);
    delete self->write;
    Py_XDECREF(self->library);
    freefunc release = reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free));
    release(object);
    Py_DECREF(type);
}

Write *open_write(PyObject *object)
{
    Requests *self = reinterpret_cast<Requests *>(object);
    if (self->write != nullptr && self->forks == forks)
        return self->write;
    PyErr_SetString(PyExc_ValueError, "the requests were not made, or before this process was forked");
    return nullptr;
}

/* Posts the requests that are in `state`. */
void run_all(Write *write, int state)
{
    for (size_t i = 0; i < write->requests.size(); i++)
        if (write->requests[i].state == state)
            write->run(i, 0, state);
}

PyObject *requests_post(PyObject *object, PyObject *argument)
{
    Write *write = open_write(object);
    const int reached = write == nullptr ? -1 : PyObject_IsTrue(argument);
    if (reached < 0)
        return nullptr;
    if (reached && write->held()) {
        run_all(write, kWaiting);
    } else {
        Py_BEGIN_ALLOW_THREADS
        run_all(write, kWaiting);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyObject *requests_resume(PyObject *object, PyObject *argument)
{
    Write *write = open_write(object);
    const long long until_ns = write == nullptr ? -1 : PyLong_AsLongLong(argument);
    if (PyErr_Occurred())
        return nullptr;
    write->until_ns = until_ns;
    Py_BEGIN_ALLOW_THREADS
    run_all(write, kSkipped);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *requests_stop(PyObject *object, PyObject *)
{
    if (Write *write = reinterpret_cast<Requests *>(object)->write) /* in a forked child, too: it may close what it has */
        write->stopped = true;
    Py_RETURN_NONE;
}

PyObject *requests_poll(PyObject *object, PyObject *)
{
    Write *write = open_write(object);
    if (write == nullptr)
        return nullptr;
    size_t left = write->poll(write->held());
    if (left && !write->held() && write->in_flight() && !write->lingering) {
        Py_BEGIN_ALLOW_THREADS
        left = write->poll();
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(left == 0);
}

PyObject *requests_error(PyObject *object, void *)
{
    Write *write = open_write(object);
    return write == nullptr ? nullptr : PyLong_FromLong(write->error);
}

PyObject *requests_post_ns(PyObject *object, void *)
{
    Write *write = open_write(object);
    return write == nullptr ? nullptr : PyLong_FromLongLong(write->post_ns);
}

PyObject *requests_skipped(PyObject *object, void *)
{
    Write *write = open_write(object);
    if (write == nullptr)
        return nullptr;
    bool skipped = false;
    for (Request &request : write->requests)
        skipped |= request.state == kSkipped;
    return PyBool_FromLong(skipped && !write->stopped);
}

PyObject *requests_unposted(PyObject *object, void *)
{
    Write *write = open_write(object);
    if (write == nullptr)
        return nullptr;
    bool unposted = false;
    for (Request &request : write->requests) {
        int state = request.state;
        unposted |= state == kWaiting || state == kSkipped;
    }
    return PyBool_FromLong(unposted);
}

void release_owner(PyObject *capsule)
{
    Py_DECREF(static_cast<PyObject *>(PyCapsule_GetContext(capsule)));
}

PyObject *requests_then(PyObject *object, void *)
{
    Write *write = open_write(object);
    PyObject *capsule = write == nullptr ? nullptr : PyCapsule_New(&write->then, THEN, nullptr);
    if (capsule == nullptr || PyCapsule_SetContext(capsule, object) || PyCapsule_SetDestructor(capsule, release_owner)) {
        Py_XDECREF(capsule);
        return nullptr;
    }
    Py_INCREF(object); /* the capsule's */
    return capsule;
}

PyMethodDef requests_methods[] = {
    {"post", requests_post, METH_O,
     "post(reached): posts all requests on the calling thread, without the GIL if they are large or the first to the peer."},
    {"resume", requests_resume, METH_O, "resume(until_ns): posts the requests that were skipped, on the calling thread."},
    {"stop", requests_stop, METH_NOARGS, "Lets no further request be posted."},
    {"poll", requests_poll, METH_NOARGS, "Polls the requests in flight and returns whether all have ended."},
    {nullptr, nullptr, 0, nullptr},
};
PyGetSetDef requests_getset[] = {
    {"error", requests_error, nullptr, "NIXL's status of the first request that failed; 0 if none has.", nullptr},
    {"post_ns", requests_post_ns, nullptr, "Time that threads have spent posting, all together.", nullptr},
    {"skipped", requests_skipped, nullptr, "Whether requests were not posted because the time limit had passed.", nullptr},
    {"unposted", requests_unposted, nullptr, "Whether requests are not posted, for example because the write was stopped.", nullptr},
    {"then", requests_then, nullptr, "What a copy pool calls after each piece to post the request of its number.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyMethodDef library_methods[] = {
    {"wait", library_wait, METH_VARARGS,
     "wait(polled, timeout_ns, pause_ns, share, turns): waits without the GIL until one of an array of struct pollfd is ready or there are tags, for\n"
     "which it looks at once and after each pause; a pause is 1 / share of the wait so far, but not shorter than pause_ns. turns is the\n"
     "capsule `Turns.calls`. Returns the tags by the sender's name, the monotonic time at which it had ended, and NIXL's status."},
    {"tell", library_tell, METH_VARARGS, "tell(peer, tag): sends a tag; returns NIXL's status."},
    {"reach", library_reach, METH_VARARGS, "reach(peer, tag): sends the first tag to a peer, without the GIL; returns NIXL's status."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot library_slots[] = {
    {Py_tp_init, reinterpret_cast<void *>(library_init)},
    {Py_tp_dealloc, reinterpret_cast<void *>(library_dealloc)},
    {Py_tp_methods, library_methods},
    {Py_tp_doc, const_cast<char *>("Library(path, abi, agent): NIXL's functions, and the agent that they are called for.")},
    {0, nullptr},
};
PyType_Slot requests_slots[] = {
    {Py_tp_init, reinterpret_cast<void *>(requests_init)},
    {Py_tp_dealloc, reinterpret_cast<void *>(requests_dealloc)},
    {Py_tp_methods, requests_methods},
    {Py_tp_getset, requests_getset},
    {Py_tp_doc, const_cast<char *>(
        "WriteRequests(library, peer, local, remote, sizes, devices, ends, tags, until_ns, linger_ns, threads): the requests of one write.\n\n"
        "local and remote are addresses. devices are those of the local and the remote memory, -1 for the host's.")},
    {0, nullptr},
};
PyType_Spec library_spec = {"kvctl_agent.native.nixl_requests.Library", sizeof(Library), 0, Py_TPFLAGS_DEFAULT, library_slots};
PyType_Spec requests_spec = {"kvctl_agent.native.nixl_requests.WriteRequests", sizeof(Requests), 0, Py_TPFLAGS_DEFAULT, requests_slots};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "nixl_requests", "Requests of NIXL without the GIL.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit_nixl_requests(void)
{
    PyObject *created = count_forks() ? PyModule_Create(&module) : nullptr;
    if (created == nullptr)
        return nullptr;
    library_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&library_spec));
    PyObject *requests_type = PyType_FromSpec(&requests_spec);
    if (library_type == nullptr || requests_type == nullptr ||
        PyModule_AddObjectRef(created, "Library", reinterpret_cast<PyObject *>(library_type)) ||
        PyModule_AddObjectRef(created, "WriteRequests", requests_type)) {
        Py_DECREF(created);
        return nullptr;
    }
    Py_DECREF(requests_type);
    return created;
}
