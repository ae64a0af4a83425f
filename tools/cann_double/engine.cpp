// The transfer engine (adxl::AdxlEngine) that Mooncake's transport "ascend" drives.
//
// An engine publishes its process and what it registered in a small file; a peer reads and writes
// that memory through the kernel. Only registered memory moves, at both ends.
#include "double.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

namespace ge {

class AscendString {
 public:
  AscendString(const char* name);
  const char* GetString() const;
  bool operator<(const AscendString& other) const;

 private:
  std::shared_ptr<std::string> name_;
};

AscendString::AscendString(const char* name)
    : name_(std::make_shared<std::string>(name != nullptr ? name : "")) {}
const char* AscendString::GetString() const { return name_ ? name_->c_str() : ""; }
bool AscendString::operator<(const AscendString& other) const {
  return strcmp(GetString(), other.GetString()) < 0;
}

}  // namespace ge

namespace adxl {

using Status = uint32_t;
constexpr Status kSuccess = 0;
constexpr Status kParamInvalid = 103900;
constexpr Status kNotConnected = 103902;
constexpr Status kAlreadyConnected = 103903;
constexpr Status kExhausted = 203900;
constexpr Status kFailed = 503900;

enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
struct MemDesc {
  uintptr_t addr;
  size_t len;
  uint8_t reserved[128];
};
struct TransferOpDesc {
  uintptr_t local_addr;
  uintptr_t remote_addr;
  size_t len;
};

constexpr int kMaxRegistrations = 256;  // per process, as HIXL documents it
constexpr uintptr_t kHuge = 2u << 20;

struct Slot {
  std::atomic<uint64_t> length;  // 0: free
  uint64_t address;
  uint64_t alias;
};
struct Table {
  std::atomic<int32_t> pid;
  Slot slots[kMaxRegistrations];
};

class AdxlEngine {
 public:
  class Impl;
  AdxlEngine();
  ~AdxlEngine();
  Status Initialize(const ge::AscendString& name,
                    const std::map<ge::AscendString, ge::AscendString>& options);
  void Finalize();
  Status RegisterMem(const MemDesc& memory, MemType type, void*& handle);
  Status DeregisterMem(void* handle);
  Status Connect(const ge::AscendString& peer, int32_t timeout_ms);
  Status Disconnect(const ge::AscendString& peer, int32_t timeout_ms);
  Status TransferSync(const ge::AscendString& peer, TransferOp op,
                      const std::vector<TransferOpDesc>& parts, int32_t timeout_ms);

 private:
  std::unique_ptr<Impl> impl_;
};

namespace {

std::mutex g_mutex;
int g_registrations = 0;

std::string directory() {
  const char* text = getenv("CANN_DOUBLE_RUN");
  return text != nullptr ? text : "/tmp/cann-double-" + std::to_string(getuid());
}

std::string path_of(const std::string& engine) {
  std::string name = engine;
  for (char& c : name) {
    if (c == '/') c = '_';
  }
  return directory() + "/" + name;
}

Table* open_table(const std::string& engine, bool create) {
  mkdir(directory().c_str(), 0700);
  const int fd = open(path_of(engine).c_str(), (create ? O_CREAT | O_TRUNC : 0) | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  if (create && ftruncate(fd, sizeof(Table)) != 0) {
    close(fd);
    return nullptr;
  }
  void* memory = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return memory == MAP_FAILED ? nullptr : static_cast<Table*>(memory);
}

const Slot* covering(const Table* table, uint64_t address, uint64_t size) {
  for (const Slot& slot : table->slots) {
    const uint64_t length = slot.length.load();
    if (length != 0 && address >= slot.address && address + size <= slot.address + length) {
      return &slot;
    }
  }
  return nullptr;
}

Status refuse(Status code, const char* what) {
  cann::fail(static_cast<int>(code), what);
  return code;
}

}  // namespace

class AdxlEngine::Impl {
 public:
  std::string name;
  Table* table = nullptr;
  bool auto_connect = false;
  std::map<std::string, Table*> peers;
};

AdxlEngine::AdxlEngine() : impl_(new Impl) {}
AdxlEngine::~AdxlEngine() { Finalize(); }

Status AdxlEngine::Initialize(const ge::AscendString& name,
                              const std::map<ge::AscendString, ge::AscendString>& options) {
  for (const auto& [key, value] : options) {
    cann::note(std::string("AdxlEngine option ") + key.GetString() + "=" + value.GetString());
    if (strcmp(key.GetString(), "AutoConnect") == 0) {
      impl_->auto_connect = strcmp(value.GetString(), "1") == 0;
    }
  }
  if (cann::current_device() < 0) return refuse(kFailed, "AdxlEngine: no context on this thread");
  impl_->name = name.GetString();
  impl_->table = open_table(impl_->name, true);
  if (impl_->table == nullptr) return refuse(kFailed, "AdxlEngine: no place for its table");
  impl_->table->pid = getpid();
  return kSuccess;
}

void AdxlEngine::Finalize() {
  if (impl_->table == nullptr) return;
  for (auto& [name, table] : impl_->peers) munmap(table, sizeof(Table));
  impl_->peers.clear();
  unlink(path_of(impl_->name).c_str());
  munmap(impl_->table, sizeof(Table));
  impl_->table = nullptr;
}

Status AdxlEngine::RegisterMem(const MemDesc& memory, MemType type, void*& handle) {
  if (cann::current_device() < 0) return refuse(kFailed, "RegisterMem: no context on this thread");
  std::lock_guard<std::mutex> lock(g_mutex);
  if (g_registrations >= kMaxRegistrations) {
    return refuse(kExhausted, "RegisterMem: 256 registrations are the limit");
  }
  const auto* pointer = reinterpret_cast<const void*>(memory.addr);
  char* alias = cann::device_alias(pointer, memory.len);
  if ((alias != nullptr) != (type == MEM_DEVICE)) {
    return refuse(kParamInvalid, alias != nullptr ? "RegisterMem: device memory, not host memory"
                                                  : "RegisterMem: host memory, not device memory");
  }
  if (type == MEM_DEVICE && memory.addr % kHuge != 0) {
    return refuse(kParamInvalid, "RegisterMem: device memory must be aligned to 2 MiB");
  }
  for (Slot& slot : impl_->table->slots) {
    if (slot.length.load() != 0) continue;
    slot.address = memory.addr;
    slot.alias = reinterpret_cast<uint64_t>(alias != nullptr ? alias : pointer);
    slot.length = memory.len;
    handle = &slot;
    ++g_registrations;
    return kSuccess;
  }
  return refuse(kExhausted, "RegisterMem: no slot left");
}

Status AdxlEngine::DeregisterMem(void* handle) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto* slot = static_cast<Slot*>(handle);
  if (slot == nullptr || slot->length.load() == 0) return kParamInvalid;
  slot->length = 0;
  --g_registrations;
  return kSuccess;
}

Status AdxlEngine::Connect(const ge::AscendString& peer, int32_t) {
  cann::note(std::string("Connect ") + peer.GetString());
  std::lock_guard<std::mutex> lock(g_mutex);
  if (impl_->peers.count(peer.GetString()) != 0) return kAlreadyConnected;
  Table* table = open_table(peer.GetString(), false);
  if (table == nullptr) return refuse(kFailed, "Connect: there is no such engine");
  impl_->peers[peer.GetString()] = table;
  return kSuccess;
}

Status AdxlEngine::Disconnect(const ge::AscendString& peer, int32_t) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto it = impl_->peers.find(peer.GetString());
  if (it == impl_->peers.end()) return kNotConnected;
  munmap(it->second, sizeof(Table));
  impl_->peers.erase(it);
  return kSuccess;
}

Status AdxlEngine::TransferSync(const ge::AscendString& peer, TransferOp op,
                                const std::vector<TransferOpDesc>& parts, int32_t timeout_ms) {
  if (impl_->auto_connect) Connect(peer, timeout_ms);
  std::lock_guard<std::mutex> lock(g_mutex);
  auto it = impl_->peers.find(peer.GetString());
  if (it == impl_->peers.end()) return refuse(kNotConnected, "TransferSync: not connected");
  const int pid = it->second->pid.load();
  for (const TransferOpDesc& part : parts) {
    const Slot* local = covering(impl_->table, part.local_addr, part.len);
    const Slot* remote = covering(it->second, part.remote_addr, part.len);
    if (local == nullptr) return refuse(kParamInvalid, "TransferSync: local memory not registered");
    if (remote == nullptr) return refuse(kParamInvalid, "TransferSync: remote memory not registered");
    char* here = reinterpret_cast<char*>(local->alias + (part.local_addr - local->address));
    char* there = reinterpret_cast<char*>(remote->alias + (part.remote_addr - remote->address));
    if (pid == getpid()) {
      if (op == READ) memmove(here, there, part.len);
      else memmove(there, here, part.len);
      continue;
    }
    const iovec mine{here, part.len};
    const iovec theirs{there, part.len};
    const ssize_t moved = op == READ ? process_vm_readv(pid, &mine, 1, &theirs, 1, 0)
                                     : process_vm_writev(pid, &mine, 1, &theirs, 1, 0);
    if (moved != static_cast<ssize_t>(part.len)) {
      return refuse(kFailed, "TransferSync: the peer does not answer");
    }
  }
  return kSuccess;
}

}  // namespace adxl
