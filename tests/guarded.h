// Memory that ends exactly at a page that cannot be touched, or begins right behind one.
#ifndef CUTLOSS_TESTS_GUARDED_H_
#define CUTLOSS_TESTS_GUARDED_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace cutloss::testing {

enum class Against { end, begin };  // which end of the buffer the forbidden page lies at; the other has one too

class GuardedMemory {
 public:
  GuardedMemory() = default;
  // All bytes 0xFF: NaN in every float, -1 in integers.
  GuardedMemory(std::size_t bytes, Against against) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    inner_ = (bytes + page - 1) / page * page;
    mapped_ = inner_ + 2 * page;
    base_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    start_ = static_cast<std::byte*>(base_) + page;
    if (inner_ > 0) protect(PROT_READ | PROT_WRITE);
    data_ = start_ + (against == Against::end ? inner_ - bytes : 0);
    if (inner_ > 0) std::memset(start_, 0xFF, inner_);
  }
  ~GuardedMemory() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }
  GuardedMemory(GuardedMemory&& other) noexcept { *this = std::move(other); }
  GuardedMemory& operator=(GuardedMemory&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(start_, other.start_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(inner_, other.inner_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }

  std::byte* data() { return data_; }
  std::size_t size() const { return bytes_; }
  void freeze() {
    if (inner_ > 0) protect(PROT_READ);
  }

 private:
  void protect(int how) {
    if (mprotect(start_, inner_, how) != 0) throw std::bad_alloc();
  }
  void* base_ = nullptr;
  std::byte* start_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0, inner_ = 0, mapped_ = 0;
};

}  // namespace cutloss::testing

#endif  // CUTLOSS_TESTS_GUARDED_H_
