// Device memory, pinned host memory, virtual memory, and memory shared between processes.
//
// A device allocation is a memfd: it is reached from another process through /proc, and it is gone
// when the last process that maps it is gone, however those ended.
#include "double.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace cann {
namespace {

constexpr size_t kHuge = 2u << 20;
constexpr size_t kHeader = 4096;
constexpr int kMaxImporters = 64;

// At the start of every segment, before its data; shared by exporter and importers.
struct Header {
  std::atomic<int> importers[kMaxImporters];
};

struct Region {
  char* base;    // what the user sees, without access rights
  char* alias;   // what the double uses
  size_t size;
  int fd;
  int device;    // physical
  bool imported;
  Header* header;
};

std::mutex g_mutex;
std::map<uintptr_t, Region> g_regions;           // by base
std::map<std::string, uintptr_t> g_imports;      // by key
std::set<std::string> g_closed_keys;             // of ours, closed for importers
std::map<void*, size_t> g_pinned;
std::map<uintptr_t, size_t> g_reserved;          // virtual address ranges
size_t g_used = 0;

size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

char* reserve(size_t size) {
  char* raw = static_cast<char*>(mmap(nullptr, size + kHuge, PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (raw == MAP_FAILED) return nullptr;
  char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(raw), kHuge));
  if (aligned != raw) munmap(raw, aligned - raw);
  munmap(aligned + size, raw + size + kHuge - (aligned + size));
  return aligned;
}

int new_segment(size_t size, int device) {
  const std::string name = "cann-d" + std::to_string(device);
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, static_cast<off_t>(size + kHeader)) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

bool map_segment(int fd, size_t size, char* at, Region* region) {
  void* header = mmap(nullptr, kHeader, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* alias = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, kHeader);
  void* base = mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, kHeader);
  if (header == MAP_FAILED || alias == MAP_FAILED || base == MAP_FAILED) return false;
  region->header = static_cast<Header*>(header);
  region->alias = static_cast<char*>(alias);
  region->base = at;
  region->size = size;
  region->fd = fd;
  return true;
}

void unmap_segment(const Region& region, bool keep_address) {
  munmap(region.header, kHeader);
  munmap(region.alias, region.size);
  if (keep_address) {
    mmap(region.base, region.size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  } else {
    munmap(region.base, region.size);
  }
  if (region.fd >= 0) close(region.fd);
}

const Region* find(const void* address, size_t size) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto it = g_regions.upper_bound(at);
  if (it == g_regions.begin()) return nullptr;
  const Region& region = (--it)->second;
  return at + size <= it->first + region.size ? &region : nullptr;
}

int living_importers(const Region& region) {
  int count = 0;
  for (auto& slot : region.header->importers) {
    const int pid = slot.load();
    if (pid != 0 && pid != getpid() && kill(pid, 0) == 0) ++count;
  }
  return count;
}

// Real hardware says nothing when a rule is broken that it does not check; a test must see it.
void complain(const char* what) {
  const char* path = getenv("CANN_DOUBLE_COMPLAINTS");
  if (path == nullptr) return;
  const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  dprintf(fd, "%d %s\n", getpid(), what);
  close(fd);
}

}  // namespace

char* device_alias(const void* address, size_t size) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const Region* region = find(address, size);
  if (region == nullptr) return nullptr;
  return region->alias + (static_cast<const char*>(address) - region->base);
}

char* any_alias(const void* address, size_t size, bool* is_device) {
  char* alias = device_alias(address, size);
  *is_device = alias != nullptr;
  return alias != nullptr ? alias : static_cast<char*>(const_cast<void*>(address));
}

int check_copy(const void* to, const void* from, size_t size, int kind) {
  bool to_device = false;
  bool from_device = false;
  any_alias(to, size, &to_device);
  any_alias(from, size, &from_device);
  if (kind == 4) return kOk;
  const bool want_to = kind == 1 || kind == 3;
  const bool want_from = kind == 2 || kind == 3;
  if (to_device != want_to || from_device != want_from) {
    return fail(kInvalidParam, "memcpy: the addresses do not fit the direction " +
                                   std::to_string(kind));
  }
  return kOk;
}

int copy_now(void* to, const void* from, size_t size) {
  bool ignored = false;
  char* target = any_alias(to, size, &ignored);
  const char* source = any_alias(from, size, &ignored);
  memmove(target, source, size);
  return kOk;
}

}  // namespace cann

using namespace cann;

EXPORT int aclrtMalloc(void** pointer, size_t size, int32_t) {
  NEED_CONTEXT
  const int device = physical_device(current_device());
  const size_t whole = round_up(size, 4096);
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_used + whole > static_cast<size_t>(setting("CANN_DOUBLE_HBM", 1L << 30))) {
    return fail(kOutOfMemory, "aclrtMalloc: out of device memory");
  }
  Region region{};
  const int fd = new_segment(whole, device);
  char* at = reserve(whole);
  if (fd < 0 || at == nullptr || !map_segment(fd, whole, at, &region)) {
    return fail(kOutOfMemory, "aclrtMalloc: no memory on this host");
  }
  region.device = device;
  g_regions[reinterpret_cast<uintptr_t>(at)] = region;
  g_used += whole;
  *pointer = at;
  return kOk;
}

EXPORT int aclrtMallocAlign32(void** pointer, size_t size, int32_t policy) {
  return aclrtMalloc(pointer, size, policy);
}

EXPORT int aclrtFree(void* pointer) {
  NEED_CONTEXT
  std::lock_guard<std::mutex> lock(g_mutex);
  auto it = g_regions.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == g_regions.end() || it->second.imported) {
    return fail(kInvalidParam, "aclrtFree: not an allocation");
  }
  if (living_importers(it->second) > 0) complain("freed while another process maps it");
  g_used -= it->second.size;
  unmap_segment(it->second, false);
  g_regions.erase(it);
  return kOk;
}

EXPORT int aclrtMallocHost(void** pointer, size_t size) {
  NEED_CONTEXT
  const size_t whole = round_up(size, 4096);
  void* memory = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return fail(kOutOfMemory, "aclrtMallocHost: no memory");
  std::lock_guard<std::mutex> lock(g_mutex);
  g_pinned[memory] = whole;
  *pointer = memory;
  return kOk;
}

EXPORT int aclrtMallocHostWithCfg(void** pointer, uint64_t size, void*) {
  return aclrtMallocHost(pointer, size);
}

EXPORT int aclrtFreeHost(void* pointer) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto it = g_pinned.find(pointer);
  if (it == g_pinned.end()) return fail(kInvalidParam, "aclrtFreeHost: not pinned memory");
  munmap(pointer, it->second);
  g_pinned.erase(it);
  return kOk;
}

EXPORT int aclrtHostRegister(void* pointer, uint64_t, int32_t, void** device_pointer) {
  NEED_CONTEXT
  if (device_pointer != nullptr) *device_pointer = pointer;
  return kOk;
}

EXPORT int aclrtGetMemInfo(int32_t, size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> lock(g_mutex);
  *total = static_cast<size_t>(setting("CANN_DOUBLE_HBM", 1L << 30));
  *free_bytes = *total - g_used;
  return kOk;
}

// Location {id, type}: 0 host, 1 device, 2 unregistered. A driver may not know an address, above all
// an imported one; by default the double knows none, the hardest case.
EXPORT int aclrtPointerGetAttributes(const void* pointer, uint32_t* attributes) {
  std::lock_guard<std::mutex> lock(g_mutex);
  memset(attributes, 0, 7 * sizeof(uint32_t));
  attributes[1] = 2;
  if (setting("CANN_DOUBLE_KNOWS_POINTERS", 0) == 0) return kOk;
  const Region* region = find(pointer, 1);
  if (region != nullptr && !region->imported) attributes[1] = 1;
  return kOk;
}

// -- between processes -------------------------------------------------------------------------

EXPORT int aclrtIpcMemGetExportKey(void* pointer, size_t, char* key, size_t length, uint64_t) {
  NEED_CONTEXT
  std::lock_guard<std::mutex> lock(g_mutex);
  auto it = g_regions.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == g_regions.end() || it->second.imported) {
    return fail(kInvalidParam, "aclrtIpcMemGetExportKey: not the start of an allocation");
  }
  struct stat info {};
  fstat(it->second.fd, &info);
  memset(key, 0, length);
  const int used = snprintf(key, length, "%d-%d-%zx-%d-%lx", getpid(), it->second.fd,
                            it->second.size, it->second.device, static_cast<long>(info.st_ino));
  g_closed_keys.erase(key);
  return used > 0 && static_cast<size_t>(used) < length ? kOk : kInvalidParam;
}

EXPORT int aclrtIpcMemSetImportPid(const char*, int32_t*, size_t) { return kOk; }

EXPORT int aclrtIpcMemImportByKey(void** pointer, const char* key, uint64_t) {
  NEED_CONTEXT
  int pid = 0;
  int theirs = 0;
  int device = 0;
  size_t size = 0;
  long inode = 0;
  if (sscanf(key, "%d-%d-%zx-%d-%lx", &pid, &theirs, &size, &device, &inode) != 5) {
    return fail(kInvalidParam, "aclrtIpcMemImportByKey: not a key");
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_imports.count(key) != 0) {
    return fail(kDriverFailure, "aclrtIpcMemImportByKey: this process has imported it already");
  }
  if (pid == getpid()) {
    return fail(kDriverFailure, "aclrtIpcMemImportByKey: exported by this process");
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(theirs);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat info {};
  if (fd < 0 || fstat(fd, &info) != 0 || static_cast<long>(info.st_ino) != inode) {
    if (fd >= 0) close(fd);
    return fail(kDriverFailure, "aclrtIpcMemImportByKey: the exporter has freed it, or is gone");
  }
  Region region{};
  char* at = reserve(size);
  if (at == nullptr || !map_segment(fd, size, at, &region)) {
    close(fd);
    return fail(kOutOfMemory, "aclrtIpcMemImportByKey: cannot map");
  }
  region.device = device;
  region.imported = true;
  for (auto& slot : region.header->importers) {
    int expected = 0;
    if (slot.compare_exchange_strong(expected, getpid())) break;
  }
  g_imports[key] = reinterpret_cast<uintptr_t>(at);
  g_regions[reinterpret_cast<uintptr_t>(at)] = region;
  *pointer = at;
  return kOk;
}

EXPORT int aclrtIpcMemClose(const char* key) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto it = g_imports.find(key);
  if (it == g_imports.end()) {
    g_closed_keys.insert(key);
    return kOk;
  }
  const Region region = g_regions[it->second];
  for (auto& slot : region.header->importers) {
    int expected = getpid();
    if (slot.compare_exchange_strong(expected, 0)) break;
  }
  unmap_segment(region, false);
  g_regions.erase(it->second);
  g_imports.erase(it);
  return kOk;
}

// -- virtual memory (expandable segments) ------------------------------------------------------

EXPORT int aclrtReserveMemAddress(void** pointer, size_t size, size_t, void*, uint64_t) {
  char* at = reserve(round_up(size, kHuge));
  if (at == nullptr) return fail(kOutOfMemory, "aclrtReserveMemAddress: no address range");
  std::lock_guard<std::mutex> lock(g_mutex);
  g_reserved[reinterpret_cast<uintptr_t>(at)] = round_up(size, kHuge);
  *pointer = at;
  return kOk;
}

EXPORT int aclrtReserveMemAddressNoUCMemory(void** pointer, size_t size, size_t alignment,
                                            void* expected, uint64_t flags) {
  return aclrtReserveMemAddress(pointer, size, alignment, expected, flags);
}

EXPORT int aclrtReleaseMemAddress(void* pointer) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto it = g_reserved.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == g_reserved.end()) return fail(kInvalidParam, "aclrtReleaseMemAddress: not reserved");
  munmap(pointer, it->second);
  g_reserved.erase(it);
  return kOk;
}

// A physical handle is its descriptor, from 1.
EXPORT int aclrtMallocPhysical(void** handle, size_t size, const void*, uint64_t) {
  NEED_CONTEXT
  const int fd = new_segment(size, physical_device(current_device()));
  if (fd < 0) return fail(kOutOfMemory, "aclrtMallocPhysical: no memory");
  *handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd) + 1);
  return kOk;
}

EXPORT int aclrtFreePhysical(void* handle) {
  close(static_cast<int>(reinterpret_cast<intptr_t>(handle)) - 1);
  return kOk;
}

EXPORT int aclrtMapMem(void* pointer, size_t size, size_t, void* handle, uint64_t) {
  Region region{};
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(handle)) - 1;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (!map_segment(dup(fd), size, static_cast<char*>(pointer), &region)) {
    return fail(kInvalidParam, "aclrtMapMem: cannot map");
  }
  region.device = physical_device(current_device());
  g_regions[reinterpret_cast<uintptr_t>(pointer)] = region;
  return kOk;
}

EXPORT int aclrtUnmapMem(void* pointer) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto it = g_regions.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == g_regions.end()) return fail(kInvalidParam, "aclrtUnmapMem: not mapped");
  unmap_segment(it->second, true);
  g_regions.erase(it);
  return kOk;
}

EXPORT int aclrtMemExportToShareableHandle(void* handle, int32_t, uint64_t, uint64_t* shareable) {
  *shareable = (static_cast<uint64_t>(getpid()) << 32) | reinterpret_cast<uintptr_t>(handle);
  return kOk;
}

EXPORT int aclrtMemGetAllocationGranularity(const void*, int32_t, size_t* granularity) {
  *granularity = kHuge;
  return kOk;
}
