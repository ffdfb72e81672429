// Reads from a cubin (an ELF file) which kernels it has, their parameters, and what they need.
//
// A kernel NAME has a section .text.NAME, and .nv.info.NAME lists its properties: a byte of format, a byte of attribute,
// and two bytes that are the value or, for format 4, the number of bytes that follow. Source: `cuobjdump -elf` and
// `readelf` on NVRTC's files; the attributes' names are those that cuobjdump prints.
#include <elf.h>

#include <cstring>

#include "driver.h"

namespace driver {
namespace {

constexpr unsigned char kMaxThreads = 0x05, kParameter = 0x17, kParameter2 = 0x45, kRegisters = 0x2f;
constexpr unsigned char kNoValue = 1, kSized = 4;

template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Calls `take(attribute, payload, payload_nbytes)` for each property in a section.
template <class Take>
void each_property(const char* at, const char* end, Take take) {
  while (end - at >= 4) {
    const unsigned char format = static_cast<unsigned char>(at[0]), attribute = static_cast<unsigned char>(at[1]);
    const unsigned value = load<uint16_t>(at + 2);
    at += 4;
    if (format != kSized) {
      if (format != kNoValue) take(attribute, at - 2, 2u);
      continue;
    }
    if (end - at < static_cast<ptrdiff_t>(value)) return;
    take(attribute, at, value);
    at += value;
  }
}

void read_info(const char* at, const char* end, KernelInfo& info) {
  each_property(at, end, [&](unsigned char attribute, const char* payload, unsigned nbytes) {
    if (attribute == kMaxThreads && nbytes >= 12) {
      info.most_threads = load<uint32_t>(payload) * load<uint32_t>(payload + 4) * load<uint32_t>(payload + 8);
    } else if ((attribute == kParameter || attribute == kParameter2) && nbytes >= 12) {
      const unsigned ordinal = load<uint16_t>(payload + 4), size = load<uint32_t>(payload + 8) >> 18;
      if (info.parameter_nbytes.size() <= ordinal) info.parameter_nbytes.resize(ordinal + 1);
      info.parameter_nbytes[ordinal] = size;
    }
  });
}

}  // namespace

size_t elf_nbytes(const char* bytes) {
  if (std::memcmp(bytes, ELFMAG, SELFMAG) != 0) return 0;
  const Elf64_Ehdr head = load<Elf64_Ehdr>(bytes);
  size_t end = head.e_shoff + size_t{head.e_shentsize} * head.e_shnum;
  for (unsigned i = 0; i < head.e_shnum; ++i) {
    const Elf64_Shdr section = load<Elf64_Shdr>(bytes + head.e_shoff + i * sizeof(Elf64_Shdr));
    if (section.sh_type != SHT_NOBITS && section.sh_offset + section.sh_size > end)
      end = section.sh_offset + section.sh_size;
  }
  return end;
}

Cubin read_cubin(const char* bytes, size_t nbytes, std::string* reason) {
  Cubin found;
  if (nbytes < sizeof(Elf64_Ehdr) || std::memcmp(bytes, ELFMAG, SELFMAG) != 0) {
    *reason = "no ELF file: the stand-in loads cubins, neither PTX nor fat binaries";
    return found;
  }
  const Elf64_Ehdr head = load<Elf64_Ehdr>(bytes);
  if (head.e_machine != EM_CUDA || nbytes < elf_nbytes(bytes)) {
    *reason = head.e_machine != EM_CUDA ? "an ELF file, but not for a GPU" : "cut short";
    return found;
  }
  // sm_90 is in the lowest byte, and from CUDA 13 on (ABI version 8) in the second.
  found.architecture = head.e_ident[EI_ABIVERSION] >= 8 ? head.e_flags >> 8 & 0xff : head.e_flags & 0xff;
  std::vector<Elf64_Shdr> sections(head.e_shnum);
  for (unsigned i = 0; i < head.e_shnum; ++i)
    sections[i] = load<Elf64_Shdr>(bytes + head.e_shoff + i * sizeof(Elf64_Shdr));
  const char* names = bytes + sections[head.e_shstrndx].sh_offset;
  const auto starts = [&](const Elf64_Shdr& section, const char* prefix, std::string* rest) {
    const char* name = names + section.sh_name;
    const size_t length = std::strlen(prefix);
    if (std::strncmp(name, prefix, length) != 0) return false;
    *rest = name + length;
    return true;
  };
  std::string kernel;
  for (const Elf64_Shdr& section : sections)
    if (starts(section, ".text.", &kernel)) found.kernels[kernel];
  for (const Elf64_Shdr& section : sections) {
    const char* at = bytes + section.sh_offset;
    if (starts(section, ".nv.info.", &kernel) && found.kernels.count(kernel))
      read_info(at, at + section.sh_size, found.kernels[kernel]);
    else if (starts(section, ".nv.shared.", &kernel) && found.kernels.count(kernel))
      found.kernels[kernel].shared_nbytes = static_cast<unsigned>(section.sh_size);
  }
  // Registers are listed once for the file, by the kernel's number among the symbols.
  for (const Elf64_Shdr& section : sections) {
    if (std::strcmp(names + section.sh_name, ".nv.info") != 0) continue;
    for (const Elf64_Shdr& table : sections) {
      if (table.sh_type != SHT_SYMTAB) continue;
      const char* strings = bytes + sections[table.sh_link].sh_offset;
      each_property(bytes + section.sh_offset, bytes + section.sh_offset + section.sh_size,
                    [&](unsigned char attribute, const char* payload, unsigned size) {
                      if (attribute != kRegisters || size < 8) return;
                      const size_t index = load<uint32_t>(payload);
                      if (index >= table.sh_size / sizeof(Elf64_Sym)) return;
                      const auto symbol = load<Elf64_Sym>(bytes + table.sh_offset + index * sizeof(Elf64_Sym));
                      const auto at = found.kernels.find(strings + symbol.st_name);
                      if (at != found.kernels.end()) at->second.registers = load<uint32_t>(payload + 4);
                    });
    }
  }
  if (found.kernels.empty()) *reason = "without any kernel";
  return found;
}

}  // namespace driver
