// A stand-in for CANN's runtime on a machine without an NPU. See README.md for what it is for.
//
// Internal interface between the files of this folder. The exported functions have the public
// names and signatures of AscendCL (acl_rt.h) and of HIXL's AdxlEngine; everything else is ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace cann {

// Error codes of AscendCL that the double answers with.
constexpr int kOk = 0;
constexpr int kInvalidParam = 107000;
constexpr int kNoContext = 107002;
constexpr int kInvalidDevice = 107001;
constexpr int kOutOfMemory = 207001;
constexpr int kUnsupported = 207000;
constexpr int kTimeout = 107020;
constexpr int kRuntimeFailure = 500003;
constexpr int kDriverFailure = 507899;

// Remembers a text for aclGetRecentErrMsg, writes it to stderr if asked to, returns `code`.
int fail(int code, const std::string& what);

// Writes a text to stderr if that is wanted.
void note(const std::string& what);

// An integer from the environment.
long setting(const char* name, long fallback);

// A device index (logical) of this thread, or -1: the thread has no context.
int current_device();
int physical_device(int logical);

// A pseudo-random number in [0, limit], by seed and by who asks.
class Dice {
 public:
  explicit Dice(uint64_t who);
  uint64_t upto(uint64_t limit);

 private:
  uint64_t state_;
};

// Device memory is mapped twice. The address that the user sees has no access rights, so that host
// code that touches it dies as it should; the double's streams and engines use the alias.
// Returns null if the range is not device memory.
char* device_alias(const void* address, size_t size);

// A readable and writable address for either kind of memory; `is_device` says which it is.
char* any_alias(const void* address, size_t size, bool* is_device);

// Copies, checking the direction: 0 H2H, 1 H2D, 2 D2H, 3 D2D, 4 by the addresses.
int check_copy(const void* to, const void* from, size_t size, int kind);
int copy_now(void* to, const void* from, size_t size);

}  // namespace cann

// Every call that needs a context on its thread begins with this.
#define NEED_CONTEXT                                                        \
  if (::cann::current_device() < 0) {                                       \
    return ::cann::fail(::cann::kNoContext,                                 \
                        std::string(__func__) + ": no context on this thread"); \
  }
