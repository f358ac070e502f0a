// What the dynamic loader sees of the library: one symbol of one version, the
// SONAME, and no library but the pinned ones.

#include <elf.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/testing/check.h"

namespace flashverify {
namespace {

std::string library_path;

// The parts of a 64-bit ELF file that this test reads.
class ElfFile {
 public:
  explicit ElfFile(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    if (bytes_.size() < sizeof(Elf64_Ehdr) || std::memcmp(bytes_.data(), ELFMAG, SELFMAG) != 0) {
      throw std::runtime_error(path + " is no ELF file");
    }
  }

  // The entries of the section of this type; empty if there is none.
  template <typename T>
  std::vector<T> section(uint32_t type) const {
    for (const Elf64_Shdr& header : sections()) {
      if (header.sh_type == type) return read<T>(header.sh_offset, header.sh_size / sizeof(T));
    }
    return {};
  }

  std::vector<Elf64_Phdr> segments() const {
    const auto header = read<Elf64_Ehdr>(0, 1)[0];
    return read<Elf64_Phdr>(header.e_phoff, header.e_phnum);
  }

  // A string of the table that the section of this type links to.
  std::string string_of(uint32_t type, uint64_t offset) const {
    const std::vector<Elf64_Shdr> all = sections();
    for (const Elf64_Shdr& header : all) {
      if (header.sh_type == type) return bytes_.data() + all[header.sh_link].sh_offset + offset;
    }
    return {};
  }

  std::vector<std::string> dynamic_strings(int64_t tag) const {
    std::vector<std::string> found;
    for (const Elf64_Dyn& entry : section<Elf64_Dyn>(SHT_DYNAMIC)) {
      if (entry.d_tag == tag) found.push_back(string_of(SHT_DYNAMIC, entry.d_un.d_val));
    }
    return found;
  }

  uint64_t dynamic_value(int64_t tag) const {
    for (const Elf64_Dyn& entry : section<Elf64_Dyn>(SHT_DYNAMIC)) {
      if (entry.d_tag == tag) return entry.d_un.d_val;
    }
    return 0;
  }

  // The names of the versions that the file defines, by index.
  std::vector<std::string> versions() const {
    std::vector<std::string> names(2);
    for (const Elf64_Shdr& header : sections()) {
      if (header.sh_type != SHT_GNU_verdef) continue;
      uint64_t at = header.sh_offset;
      for (uint32_t i = 0; i < header.sh_info; ++i) {
        const auto version = read<Elf64_Verdef>(at, 1)[0];
        const auto name = read<Elf64_Verdaux>(at + version.vd_aux, 1)[0];
        names.resize(std::max<size_t>(names.size(), version.vd_ndx + size_t{1}));
        names[version.vd_ndx] = string_of(SHT_GNU_verdef, name.vda_name);
        at += version.vd_next;
      }
    }
    return names;
  }

 private:
  template <typename T>
  std::vector<T> read(uint64_t offset, uint64_t count) const {
    std::vector<T> values(count);
    if (offset + count * sizeof(T) > bytes_.size()) throw std::runtime_error("truncated");
    std::memcpy(values.data(), bytes_.data() + offset, count * sizeof(T));
    return values;
  }

  std::vector<Elf64_Shdr> sections() const {
    const auto header = read<Elf64_Ehdr>(0, 1)[0];
    return read<Elf64_Shdr>(header.e_shoff, header.e_shnum);
  }

  std::vector<char> bytes_;
};

TEST(the_soname_carries_the_revision) {
  const ElfFile library(library_path);
  CHECK(library.dynamic_strings(DT_SONAME) == std::vector<std::string>{"libflashverify.so.4"});
}

TEST(one_symbol_of_one_version_is_exported) {
  const ElfFile library(library_path);
  const std::vector<std::string> versions = library.versions();
  const auto symbols = library.section<Elf64_Sym>(SHT_DYNSYM);
  const auto version_of = library.section<Elf64_Half>(SHT_GNU_versym);
  CHECK_EQ(symbols.size(), version_of.size());
  std::vector<std::string> exported;
  for (size_t i = 0; i < symbols.size(); ++i) {
    // Some linkers keep section symbols, which are local.
    if (ELF64_ST_BIND(symbols[i].st_info) == STB_LOCAL) continue;
    if (symbols[i].st_shndx == SHN_UNDEF) continue;
    const std::string name = library.string_of(SHT_DYNSYM, symbols[i].st_name);
    if (symbols[i].st_shndx == SHN_ABS && name == "FLASHVERIFY_4") continue;  // the version itself
    CHECK_EQ(static_cast<int>(ELF64_ST_TYPE(symbols[i].st_info)), STT_FUNC);
    exported.push_back(name + "@" + versions.at(version_of[i] & 0x7FFF));
  }
  TRACE("%zu symbols, the last is %s", exported.size(),
        exported.empty() ? "none" : exported.back().c_str());
  CHECK(exported == std::vector<std::string>{"fv_get_api@FLASHVERIFY_4"});
}

// No Python, no torch, no CUDA: the CPU part must load anywhere.
TEST(no_library_but_the_pinned_ones_is_needed) {
  const ElfFile library(library_path);
  const std::vector<std::string> pinned = {
      "ld-linux-x86-64.so.2", "libc.so.6",  "libgcc_s.so.1",  "libm.so.6",
      "libpthread.so.0",      "libdl.so.2", "libstdc++.so.6", "libtbb.so.12"};
  const std::vector<std::string> needed = library.dynamic_strings(DT_NEEDED);
  for (const std::string& name : needed) {
    TRACE("%s", name.c_str());
    CHECK(std::find(pinned.begin(), pinned.end(), name) != pinned.end());
  }
  CHECK(std::find(needed.begin(), needed.end(), "libtbb.so.12") != needed.end());
}

TEST(libraries_are_sought_beside_it_and_nowhere_else) {
  const ElfFile library(library_path);
  CHECK(library.dynamic_strings(DT_RPATH).empty());
  CHECK(library.dynamic_strings(DT_RUNPATH) == std::vector<std::string>{"$ORIGIN"});
}

TEST(it_is_hardened) {
  const ElfFile library(library_path);
  CHECK_EQ(library.dynamic_value(DT_TEXTREL), uint64_t{0});
  CHECK((library.dynamic_value(DT_FLAGS_1) & DF_1_NOW) != 0);
  bool relro = false;
  bool stack = false;
  for (const Elf64_Phdr& segment : library.segments()) {
    relro |= segment.p_type == PT_GNU_RELRO;
    if (segment.p_type != PT_GNU_STACK) continue;
    stack = true;
    CHECK_EQ(segment.p_flags & PF_X, 0u);
  }
  CHECK(relro);
  CHECK(stack);
}

}  // namespace
}  // namespace flashverify

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  flashverify::library_path = argv[1];
  return flashverify::testing::run_tests(argc - 1, argv + 1);
}
