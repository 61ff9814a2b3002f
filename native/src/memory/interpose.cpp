#include "tieroff/memory/interpose.hpp"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

namespace tieroff {

namespace {

#if defined(__x86_64__)
bool is_function_slot(std::uint64_t info) {
  const auto type = ELF64_R_TYPE(info);
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT;
}
#elif defined(__aarch64__)
bool is_function_slot(std::uint64_t info) {
  const auto type = ELF64_R_TYPE(info);
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT;
}
#else
bool is_function_slot(std::uint64_t) { return false; }
#endif

// What the dynamic section of a library says about the entries that the loader fills.
struct Tables {
  const char* names = nullptr;
  const ElfW(Sym) * symbols = nullptr;
  std::span<const ElfW(Rela)> lazy;
  std::span<const ElfW(Rela)> eager;
};

Tables read_tables(const dl_phdr_info& library, const ElfW(Phdr) & dynamic) {
  // glibc has put addresses in the place of offsets, musl has not.
  const auto at = [&](ElfW(Addr) value) { return value < library.dlpi_addr ? library.dlpi_addr + value : value; };
  Tables tables;
  const ElfW(Rela)* lazy = nullptr;
  const ElfW(Rela)* eager = nullptr;
  std::size_t lazy_bytes = 0;
  std::size_t eager_bytes = 0;
  bool has_addends = false;
  for (const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + dynamic.p_vaddr); entry->d_tag != DT_NULL;
       ++entry) {
    switch (entry->d_tag) {
      case DT_STRTAB:
        tables.names = reinterpret_cast<const char*>(at(entry->d_un.d_ptr));
        break;
      case DT_SYMTAB:
        tables.symbols = reinterpret_cast<const ElfW(Sym)*>(at(entry->d_un.d_ptr));
        break;
      case DT_JMPREL:
        lazy = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr));
        break;
      case DT_PLTRELSZ:
        lazy_bytes = entry->d_un.d_val;
        break;
      case DT_PLTREL:
        has_addends = entry->d_un.d_val == DT_RELA;
        break;
      case DT_RELA:
        eager = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr));
        break;
      case DT_RELASZ:
        eager_bytes = entry->d_un.d_val;
        break;
      default:
        break;
    }
  }
  if (has_addends && lazy != nullptr) tables.lazy = {lazy, lazy_bytes / sizeof(ElfW(Rela))};
  if (eager != nullptr) tables.eager = {eager, eager_bytes / sizeof(ElfW(Rela))};
  return tables;
}

std::uintptr_t page_of(std::uintptr_t place) {
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  return place / page_bytes * page_bytes;
}

// Whether the loader made the place read-only once it had filled it: whole pages, the last one only if all of it is.
bool is_read_only(const dl_phdr_info& library, std::uintptr_t place) {
  const std::span<const ElfW(Phdr)> headers(library.dlpi_phdr, library.dlpi_phnum);
  return std::any_of(headers.begin(), headers.end(), [&](const ElfW(Phdr) & header) {
    const std::uintptr_t start = library.dlpi_addr + header.p_vaddr;
    return header.p_type == PT_GNU_RELRO && place >= page_of(start) && place < page_of(start + header.p_memsz);
  });
}

// Whether an address lies in what the library itself has in memory, as an entry does that was not used yet.
bool is_inside(const dl_phdr_info& library, std::uintptr_t address) {
  const std::span<const ElfW(Phdr)> headers(library.dlpi_phdr, library.dlpi_phnum);
  return std::any_of(headers.begin(), headers.end(), [&](const ElfW(Phdr) & header) {
    const std::uintptr_t start = library.dlpi_addr + header.p_vaddr;
    return header.p_type == PT_LOAD && address >= start && address < start + header.p_memsz;
  });
}

// Returns 0 or errno.
int write_slot(const dl_phdr_info& library, std::uintptr_t place, void* replacement) {
  const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* const page = reinterpret_cast<void*>(page_of(place));
  const bool is_protected = is_read_only(library, place);
  if (is_protected && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return errno;
  std::atomic_ref(*reinterpret_cast<void**>(place)).store(replacement);  // other threads may be calling
  if (is_protected) mprotect(page, page_bytes, PROT_READ);
  return 0;
}

struct Search {
  std::string_view library;
  const char* function;
  void* original;
  void* replacement;
  std::size_t replaced_count = 0;
  int error = 0;
};

void replace_in(const dl_phdr_info& library, const ElfW(Phdr) & dynamic, Search& search) {
  const Tables tables = read_tables(library, dynamic);
  if (tables.names == nullptr || tables.symbols == nullptr) return;
  std::vector<std::uintptr_t> places;
  for (const auto& entries : {tables.lazy, tables.eager}) {
    for (const ElfW(Rela) & entry : entries) {
      if (!is_function_slot(entry.r_info)) continue;
      if (std::strcmp(tables.names + tables.symbols[ELF64_R_SYM(entry.r_info)].st_name, search.function) != 0) continue;
      places.push_back(library.dlpi_addr + entry.r_offset);
    }
  }
  const bool is_taken = std::any_of(places.begin(), places.end(), [&](std::uintptr_t place) {
    const void* const found = *reinterpret_cast<void* const*>(place);
    const bool is_known = found == search.original || found == search.replacement || found == nullptr;
    return !is_known && !is_inside(library, reinterpret_cast<std::uintptr_t>(found));
  });
  if (is_taken) return;
  for (const std::uintptr_t place : places) {
    search.error = write_slot(library, place, search.replacement);
    if (search.error != 0) return;
    ++search.replaced_count;
  }
}

int visit(dl_phdr_info* library, std::size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  const std::string_view path = library->dlpi_name;
  if (path.substr(path.rfind('/') + 1) != search.library) return 0;
  for (int i = 0; i < library->dlpi_phnum; ++i)
    if (library->dlpi_phdr[i].p_type == PT_DYNAMIC && search.error == 0) replace_in(*library, library->dlpi_phdr[i], search);
  return search.error;
}

}  // namespace

std::size_t interpose(const char* library, const char* function, void* original, void* replacement) {
  Search search{.library = library, .function = function, .original = original, .replacement = replacement};
  dl_iterate_phdr(visit, &search);
  if (search.error != 0) throw std::system_error(search.error, std::generic_category(), "mprotect");
  return search.replaced_count;
}

}  // namespace tieroff
