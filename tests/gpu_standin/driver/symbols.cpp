// Where functions are found: by name, as cuGetProcAddress does; and CuPy's CUDA runtime, which is made to be the stand-in's.
//
// CuPy carries NVIDIA's runtime inside its own extension modules. That runtime talks to NVIDIA's driver through tables
// that are not documented. So the stand-in's runtime takes its place: each of its functions, known by name from the
// module's symbols, begins with a jump to the stand-in's function of that name, or to one that ends the process. The file
// on disk is not changed.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>

#include "driver.h"

#ifndef __x86_64__
#error "the stand-in writes jumps of x86-64"
#endif

namespace driver {
namespace {

constexpr size_t kJumpNbytes = 12;
constexpr size_t kCodeNbytes = 1 << 20;

void write_jump(char* at, const void* target) {  // movabs rax, target; jmp rax
  const unsigned char code[] = {0x48, 0xb8}, jump[] = {0xff, 0xe0};
  std::memcpy(at, code, 2);
  std::memcpy(at + 2, &target, 8);
  std::memcpy(at + 10, jump, 2);
}

uintptr_t base_of(const std::string& path) {
  struct Wanted {
    const std::string* path;
    uintptr_t base;
  } wanted = {&path, 0};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* into = static_cast<Wanted*>(data);
        if (*into->path != info->dlpi_name) return 0;
        into->base = info->dlpi_addr;
        return 1;
      },
      &wanted);
  return wanted.base;
}

// `name` of the runtime, without what CuPy's build may add for its default stream.
std::string plain(std::string name) {
  for (const char* suffix : {"_ptsz", "_ptds"}) {
    const size_t length = std::strlen(suffix);
    if (name.size() > length && name.compare(name.size() - length, length, suffix) == 0)
      name.resize(name.size() - length);
  }
  return name;
}

void* own_symbol(const char* name) {
  static void* self = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&write_jump), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  void* found = dlsym(self, name);  // also what it needs: the runtime's, which no name of the driver's has
  return found;
}

}  // namespace

void* function_that_gives_up(const char* name) {
  static std::mutex mutex;
  static char *next = nullptr, *end = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  constexpr size_t kNbytes = 10 + kJumpNbytes;  // movabs rdi, name; then the jump
  if (end - next < static_cast<ptrdiff_t>(kNbytes)) {
    void* made = mmap(nullptr, kCodeNbytes, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return nullptr;
    next = static_cast<char*>(made), end = next + kCodeNbytes;
  }
  char* at = next;
  next += (kNbytes + 15) / 16 * 16;
  const char* kept = strdup(name);
  const unsigned char code[] = {0x48, 0xbf};
  std::memcpy(at, code, 2);
  std::memcpy(at + 2, &kept, 8);
  write_jump(at + 10, reinterpret_cast<const void*>(&gpu_standin_unknown));
  return at;
}

}  // namespace driver

using namespace driver;

extern "C" {

// The function of this name and of the version that fits: NAME_v3 and NAME_v2 before NAME. One that the stand-in does not
// have ends the process with its name when it is called: torch asks for all of its functions when it begins.
CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  *function = nullptr;
  for (const char* version : {"_v3", "_v2", ""})
    if (!*function) *function = own_symbol((std::string(name) + version).c_str());
  if (!*function) *function = function_that_gives_up(name);
  if (found) *found = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
#undef cuGetProcAddress
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// Tables of functions without names, of which there are none here. NVRTC asks for one, and goes on without it.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

// Makes the stand-in's the CUDA runtime that is inside a loaded library. Returns what is wrong, or NULL.
const char* gpu_standin_take_runtime_of(const char* path) {
  static std::string reason;
  const auto wrong = [&](const std::string& why) {
    reason = std::string(path) + " " + why;
    return reason.c_str();
  };
  const uintptr_t base = base_of(path);
  if (!base) return wrong("is not loaded");
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  Elf64_Ehdr head;
  if (bytes.size() < sizeof head) return wrong("cannot be read");
  std::memcpy(&head, bytes.data(), sizeof head);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(bytes.data() + head.e_shoff);
  int taken = 0;
  const long page = sysconf(_SC_PAGESIZE);
  for (unsigned i = 0; i < head.e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(bytes.data() + sections[i].sh_offset);
    const char* strings = bytes.data() + sections[sections[i].sh_link].sh_offset;
    for (size_t j = 0; j < sections[i].sh_size / sizeof(Elf64_Sym); ++j) {
      const Elf64_Sym& symbol = symbols[j];
      const char* name = strings + symbol.st_name;
      const bool of_runtime = std::strncmp(name, "cuda", 4) == 0 && name[4] >= 'A' && name[4] <= 'Z';
      if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || !of_runtime || symbol.st_shndx == SHN_UNDEF) continue;
      if (symbol.st_size < kJumpNbytes) return wrong(std::string("has no room for a jump in ") + name);
      void* target = own_symbol(plain(name).c_str());
      if (!target) target = function_that_gives_up(name);
      char* at = reinterpret_cast<char*>(base + symbol.st_value);
      char* first = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(at) / page * page);
      const size_t length = static_cast<size_t>(at + kJumpNbytes - first);
      if (mprotect(first, length, PROT_READ | PROT_WRITE | PROT_EXEC)) return wrong("cannot be changed in memory");
      write_jump(at, target);
      mprotect(first, length, PROT_READ | PROT_EXEC);
      ++taken;
    }
  }
  return taken ? nullptr : wrong("has no symbols of a CUDA runtime in it");
}

}  // extern "C"
