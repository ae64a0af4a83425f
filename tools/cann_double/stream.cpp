// Streams and events. Each stream is a thread that does one thing after another, each as late as
// the dice say; nothing orders two streams but an event.
#include "double.h"

#include <atomic>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <linux/futex.h>
#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

namespace cann {
namespace {

constexpr uint32_t kIpcEvent = 0x40;

// What an event is, in memory that several processes may share.
struct EventWord {
  std::atomic<uint64_t> recorded;   // records that have reached a stream
  std::atomic<uint64_t> completed;  // newest record that the device has passed
  std::atomic<uint32_t> bell;       // futex
};

struct Event {
  EventWord* word;
  int fd;  // of an event that another process may open; else -1
};

struct Handle {
  char mark[8];
  int32_t pid;
  int32_t fd;
  uint64_t inode;
  char rest[40];
};
static_assert(sizeof(Handle) == 64, "the public size of an event handle");

// What a test holds back in this process: streams do nothing, launches do not return.
std::atomic<bool> g_hold_streams{false};
std::atomic<bool> g_hold_launches{false};

void wait_while(const std::atomic<bool>& held) {
  while (held.load()) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void ring(EventWord* word) {
  word->bell.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word->bell), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

// Returns false if `stop` was set before the record was passed.
bool wait_for(EventWord* word, uint64_t record, const std::atomic<bool>* stop) {
  while (word->completed.load() < record) {
    if (stop != nullptr && stop->load()) return false;
    const uint32_t seen = word->bell.load();
    if (word->completed.load() >= record) break;
    const timespec nap{0, 5'000'000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word->bell), FUTEX_WAIT, seen, &nap, nullptr,
            0);
  }
  return true;
}

void complete(EventWord* word, uint64_t record) {
  uint64_t old = word->completed.load();
  while (old < record && !word->completed.compare_exchange_weak(old, record)) {
  }
  ring(word);
}

class Stream {
 public:
  explicit Stream(uint64_t number) : dice_(number), thread_([this] { run(); }) {}

  void put(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  bool synchronize(long timeout_ms) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto idle = [this] { return tasks_.empty() && !busy_; };
    if (timeout_ms < 0) {
      changed_.wait(lock, idle);
      return true;
    }
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), idle);
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !busy_;
  }

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  std::atomic<bool> stopping_{false};

 private:
  void run() {
    const auto limit = static_cast<uint64_t>(setting("CANN_DOUBLE_DELAY_US", 0));
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (stopping_ && tasks_.empty()) return;
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      wait_while(g_hold_streams);
      if (limit != 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(dice_.upto(limit)));
      }
      task();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  Dice dice_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false;
  std::thread thread_;
};

std::mutex g_mutex;
std::set<Stream*> g_streams;
uint64_t g_count = 0;

// A launch takes a while, in the thread that launches: behind it lies all that waits for it.
void launch() {
  wait_while(g_hold_launches);
  const auto limit = static_cast<uint64_t>(setting("CANN_DOUBLE_LAUNCH_US", 0));
  if (limit == 0) return;
  static thread_local Dice dice(static_cast<uint64_t>(gettid()));
  std::this_thread::sleep_for(std::chrono::microseconds(dice.upto(limit)));
}

// The stream that a null handle means.
Stream* default_stream() {
  static Stream* stream = new Stream(0);
  return stream;
}

Stream* stream_of(void* handle) {
  return handle == nullptr ? default_stream() : static_cast<Stream*>(handle);
}

EventWord* map_word(int fd) {
  void* memory = fd >= 0
                     ? mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                     : calloc(1, sizeof(EventWord));
  return memory == MAP_FAILED ? nullptr : static_cast<EventWord*>(memory);
}

}  // namespace
}  // namespace cann

using namespace cann;

// For tests: holds this process's streams or launches back, or lets them go.
EXPORT void cann_double_hold(int streams, int launches) {
  g_hold_streams = streams != 0;
  g_hold_launches = launches != 0;
}

EXPORT int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) {
  NEED_CONTEXT
  std::lock_guard<std::mutex> lock(cann::g_mutex);
  auto* made = new Stream(++g_count);
  g_streams.insert(made);
  *stream = made;
  return kOk;
}

EXPORT int aclrtCreateStream(void** stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

EXPORT int aclrtDestroyStream(void* stream) {
  {
    std::lock_guard<std::mutex> lock(cann::g_mutex);
    if (g_streams.erase(static_cast<Stream*>(stream)) == 0) {
      return fail(kInvalidParam, "aclrtDestroyStream: no such stream");
    }
  }
  static_cast<Stream*>(stream)->end();
  delete static_cast<Stream*>(stream);
  return kOk;
}

EXPORT int aclrtDestroyStreamForce(void* stream) { return aclrtDestroyStream(stream); }

EXPORT int aclrtSynchronizeStream(void* stream) {
  NEED_CONTEXT
  stream_of(stream)->synchronize(-1);
  return kOk;
}

EXPORT int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t timeout_ms) {
  NEED_CONTEXT
  return stream_of(stream)->synchronize(timeout_ms) ? kOk : fail(kTimeout, "stream: timeout");
}

EXPORT int aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  NEED_CONTEXT
  std::set<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(cann::g_mutex);
    all = g_streams;
  }
  for (Stream* stream : all) {
    if (!stream->synchronize(timeout_ms)) return fail(kTimeout, "device: timeout");
  }
  default_stream()->synchronize(-1);
  return kOk;
}

EXPORT int aclrtSynchronizeDevice() { return aclrtSynchronizeDeviceWithTimeout(-1); }

EXPORT int aclrtStreamQuery(void* stream, int32_t* status) {
  *status = stream_of(stream)->idle() ? 0 : 1;
  return kOk;
}

EXPORT int aclrtStreamGetId(void* stream, int32_t* id) {
  *id = static_cast<int32_t>(reinterpret_cast<uintptr_t>(stream) >> 4 & 0xFFFF);
  return kOk;
}

EXPORT int aclrtLaunchCallback(void (*function)(void*), void* data, int32_t, void* stream) {
  stream_of(stream)->put([=] { function(data); });
  return kOk;
}

EXPORT int aclrtLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  stream_of(stream)->put([=] { function(data); });
  return kOk;
}

// -- copies ------------------------------------------------------------------------------------

EXPORT int aclrtMemcpy(void* to, size_t limit, const void* from, size_t size, int32_t kind) {
  NEED_CONTEXT
  if (size > limit) return fail(kInvalidParam, "aclrtMemcpy: larger than the target");
  const int code = check_copy(to, from, size, kind);
  return code != kOk ? code : copy_now(to, from, size);
}

EXPORT int aclrtMemcpyAsync(void* to, size_t limit, const void* from, size_t size, int32_t kind,
                            void* stream) {
  NEED_CONTEXT
  if (size > limit) return fail(kInvalidParam, "aclrtMemcpyAsync: larger than the target");
  const int code = check_copy(to, from, size, kind);
  if (code != kOk) return code;
  launch();
  stream_of(stream)->put([=] { copy_now(to, from, size); });
  return kOk;
}

EXPORT int aclrtMemcpyBatch(void** to, size_t* limits, void** from, size_t* sizes, size_t count,
                            void*, size_t*, size_t, size_t* failed) {
  NEED_CONTEXT
  *failed = SIZE_MAX;
  for (size_t i = 0; i < count; ++i) {
    const int code = aclrtMemcpy(to[i], limits[i], from[i], sizes[i], 4);
    if (code != kOk) {
      *failed = i;
      return code;
    }
  }
  return kOk;
}

EXPORT int aclrtMemcpyBatchAsync(void** to, size_t* limits, void** from, size_t* sizes,
                                 size_t count, void*, size_t*, size_t, size_t* failed,
                                 void* stream) {
  NEED_CONTEXT
  *failed = SIZE_MAX;
  for (size_t i = 0; i < count; ++i) {
    const int code = aclrtMemcpyAsync(to[i], limits[i], from[i], sizes[i], 4, stream);
    if (code != kOk) {
      *failed = i;
      return code;
    }
  }
  return kOk;
}

EXPORT int aclrtMemset(void* to, size_t limit, int32_t value, size_t size) {
  NEED_CONTEXT
  char* alias = size <= limit ? device_alias(to, size) : nullptr;
  if (alias == nullptr) return fail(kInvalidParam, "aclrtMemset: not device memory");
  memset(alias, value, size);
  return kOk;
}

EXPORT int aclrtMemsetAsync(void* to, size_t limit, int32_t value, size_t size, void* stream) {
  NEED_CONTEXT
  char* alias = size <= limit ? device_alias(to, size) : nullptr;
  if (alias == nullptr) return fail(kInvalidParam, "aclrtMemsetAsync: not device memory");
  stream_of(stream)->put([=] { memset(alias, value, size); });
  return kOk;
}

// -- events ------------------------------------------------------------------------------------

EXPORT int aclrtCreateEventExWithFlag(void** event, uint32_t flag) {
  NEED_CONTEXT
  int fd = -1;
  if ((flag & kIpcEvent) != 0) {
    if (setting("CANN_DOUBLE_IPC_EVENTS", 1) == 0) {
      return fail(kUnsupported, "events between processes are not supported");
    }
    fd = memfd_create("cann-event", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 4096) != 0) return fail(kRuntimeFailure, "event: no memory");
  }
  EventWord* word = map_word(fd);
  if (word == nullptr) return fail(kRuntimeFailure, "event: no memory");
  *event = new Event{word, fd};
  return kOk;
}

EXPORT int aclrtCreateEventWithFlag(void** event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}

EXPORT int aclrtCreateEvent(void** event) { return aclrtCreateEventExWithFlag(event, 0); }

EXPORT int aclrtDestroyEvent(void* handle) {
  auto* event = static_cast<Event*>(handle);
  // A stream may still wait for it, or pass it: what it is in memory stays.
  if (event->fd >= 0) close(event->fd);
  delete event;
  return kOk;
}

EXPORT int aclrtRecordEvent(void* event, void* stream) {
  launch();
  EventWord* word = static_cast<Event*>(event)->word;
  const uint64_t record = word->recorded.fetch_add(1) + 1;
  stream_of(stream)->put([=] { complete(word, record); });
  return kOk;
}

EXPORT int aclrtResetEvent(void*, void*) { return kOk; }

// The trap of real events: one that has not been recorded yet is not waited for.
EXPORT int aclrtStreamWaitEvent(void* stream, void* event) {
  EventWord* word = static_cast<Event*>(event)->word;
  const uint64_t record = word->recorded.load();
  Stream* waiter = stream_of(stream);
  waiter->put([=] { wait_for(word, record, &waiter->stopping_); });
  return kOk;
}

EXPORT int aclrtSynchronizeEvent(void* event) {
  EventWord* word = static_cast<Event*>(event)->word;
  wait_for(word, word->recorded.load(), nullptr);
  return kOk;
}

EXPORT int aclrtQueryEventStatus(void* event, int32_t* status) {
  EventWord* word = static_cast<Event*>(event)->word;
  *status = word->completed.load() >= word->recorded.load() ? 1 : 0;
  return kOk;
}

EXPORT int aclrtQueryEventWaitStatus(void* event, int32_t* status) {
  EventWord* word = static_cast<Event*>(event)->word;
  *status = word->completed.load() >= word->recorded.load() ? 0 : 1;
  return kOk;
}

EXPORT int aclrtEventElapsedTime(float* ms, void*, void*) {
  *ms = 0;
  return kOk;
}

EXPORT int aclrtIpcGetEventHandle(void* event, Handle* handle) {
  const int fd = static_cast<Event*>(event)->fd;
  if (fd < 0) return fail(kInvalidParam, "aclrtIpcGetEventHandle: not an IPC event");
  struct stat info {};
  fstat(fd, &info);
  memset(handle, 0, sizeof *handle);
  memcpy(handle->mark, "cannevt", 8);
  handle->pid = getpid();
  handle->fd = fd;
  handle->inode = info.st_ino;
  return kOk;
}

EXPORT int aclrtIpcOpenEventHandle(Handle handle, void** event) {
  NEED_CONTEXT
  if (memcmp(handle.mark, "cannevt", 8) != 0) {
    return fail(kInvalidParam, "aclrtIpcOpenEventHandle: not a handle");
  }
  const std::string path =
      "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info {};
  if (fd < 0 || fstat(fd, &info) != 0 || info.st_ino != handle.inode) {
    if (fd >= 0) close(fd);
    return fail(kDriverFailure, "aclrtIpcOpenEventHandle: the event is gone");
  }
  EventWord* word = map_word(fd);
  *event = new Event{word, fd};
  return word != nullptr ? kOk : fail(kRuntimeFailure, "event: no memory");
}
