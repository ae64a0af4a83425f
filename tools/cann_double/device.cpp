// Devices, contexts, identity, settings and error texts.
#include "double.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <unistd.h>
#include <vector>

namespace cann {
namespace {

thread_local int t_device = -1;
thread_local std::string t_error;

std::vector<int> visible_devices() {
  const long count = setting("CANN_DOUBLE_DEVICES", 2);
  const char* text = getenv("ASCEND_RT_VISIBLE_DEVICES");
  std::vector<int> visible;
  if (text == nullptr || *text == 0) {
    for (int i = 0; i < count; ++i) visible.push_back(i);
    return visible;
  }
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) {
    const int physical = atoi(part.c_str());
    if (physical >= 0 && physical < count) visible.push_back(physical);
  }
  return visible;
}

const std::vector<int>& devices() {
  static const std::vector<int> list = visible_devices();
  return list;
}

}  // namespace

int fail(int code, const std::string& what) {
  t_error = what;
  note(std::to_string(code) + " " + what);
  return code;
}

void note(const std::string& what) {
  if (setting("CANN_DOUBLE_VERBOSE", 0) == 0) return;
  fprintf(stderr, "cann double [%d]: %s\n", getpid(), what.c_str());
}

long setting(const char* name, long fallback) {
  const char* text = getenv(name);
  return text == nullptr || *text == 0 ? fallback : strtol(text, nullptr, 0);
}

int current_device() { return t_device; }

int physical_device(int logical) {
  return logical >= 0 && logical < static_cast<int>(devices().size()) ? devices()[logical] : -1;
}

Dice::Dice(uint64_t who)
    : state_(static_cast<uint64_t>(setting("CANN_DOUBLE_SEED", 1)) * 0x9E3779B97F4A7C15ull +
             who * 0xD1B54A32D192ED03ull + 1) {}

uint64_t Dice::upto(uint64_t limit) {
  state_ ^= state_ << 13;
  state_ ^= state_ >> 7;
  state_ ^= state_ << 17;
  return limit == 0 ? 0 : state_ % (limit + 1);
}

}  // namespace cann

using cann::fail;

EXPORT int aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(cann::devices().size());
  return cann::kOk;
}

EXPORT int aclrtSetDevice(int32_t device) {
  if (cann::physical_device(device) < 0) {
    return fail(cann::kInvalidDevice, "aclrtSetDevice: no such device");
  }
  cann::t_device = device;
  return cann::kOk;
}

EXPORT int aclrtResetDevice(int32_t) { return cann::kOk; }

EXPORT int aclrtGetDevice(int32_t* device) {
  NEED_CONTEXT
  *device = cann::t_device;
  return cann::kOk;
}

// A context is the device's number, from 1.
EXPORT int aclrtGetCurrentContext(void** context) {
  NEED_CONTEXT
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(cann::t_device + 1));
  return cann::kOk;
}

EXPORT int aclrtSetCurrentContext(void* context) {
  return aclrtSetDevice(static_cast<int32_t>(reinterpret_cast<intptr_t>(context)) - 1);
}

EXPORT int aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags != nullptr) *flags = 0;
  if (active != nullptr) *active = 1;
  return cann::kOk;
}

EXPORT int aclrtGetPhyDevIdByLogicDevId(int32_t logical, int32_t* physical) {
  *physical = cann::physical_device(logical);
  return *physical < 0 ? fail(cann::kInvalidDevice, "no such device") : cann::kOk;
}

EXPORT int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* logical) {
  *logical = user;
  return cann::kOk;
}

EXPORT int aclrtDeviceGetUuid(int32_t device, char* uuid) {
  memset(uuid, 0, 16);
  const long mode = cann::setting("CANN_DOUBLE_UUID", 1);
  if (mode == 0) return fail(cann::kUnsupported, "aclrtDeviceGetUuid: not supported");
  snprintf(uuid, 16, "double-npu-%d", cann::physical_device(device));
  return cann::kOk;
}

EXPORT const char* aclrtGetSocName() { return "Ascend910B1"; }

EXPORT const char* aclGetRecentErrMsg() { return cann::t_error.c_str(); }

EXPORT int aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return cann::kOk;
}

EXPORT int aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return cann::kOk;
}

EXPORT int aclrtGetRunMode(int32_t* mode) {
  *mode = 1;  // host
  return cann::kOk;
}

EXPORT int aclrtGetDeviceSatMode(int32_t* mode) {
  *mode = 0;
  return cann::kOk;
}

EXPORT int aclrtGetSysParamOpt(int32_t, int64_t* value) {
  *value = 0;
  return cann::kOk;
}

EXPORT int aclrtCtxGetSysParamOpt(int32_t, int64_t* value) {
  *value = 0;
  return cann::kOk;
}

EXPORT int aclGetDeviceCapability(uint32_t, int32_t, int64_t* value) {
  *value = 24;
  return cann::kOk;
}
