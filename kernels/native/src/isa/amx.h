// Intel's tile unit (AMX): products of bfloat16 tiles, summed in float32, and of tiles of integers.
//
// Registers: sums 0 to 3, then two tiles of the left factor (4, 5) and two of the right (6, 7).
// The compilers' intrinsics are not used: those of GCC 12 do not say that they read memory.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rootlace {

// Configuration of the registers: register r has rows[r] rows of bytes[r] bytes.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  TileShapes() = default;
  // For two row tiles of sums with `first` and `second` rows; `second` 0: one row tile.
  TileShapes(int first, int second) {
    for (int r : {0, 1, 4}) set(r, first);
    for (int r : {2, 3, 5}) set(r, second);
    for (int r : {6, 7}) set(r, 16);
  }
  // The same with weights as the left factor: sums have a column for each row of x.
  static TileShapes turned(int first, int second) {
    TileShapes shapes;
    for (int r : {0, 1, 6}) shapes.set(r, 16, 4 * first);
    for (int r : {2, 3, 7}) shapes.set(r, second ? 16 : 0, 4 * second);
    for (int r : {4, 5}) shapes.set(r, 16);
    return shapes;
  }

 private:
  void set(int r, int count, int width = 64) {
    rows[r] = static_cast<uint8_t>(count);
    bytes[r] = static_cast<uint16_t>(count ? width : 0);
  }
};

class AmxTiles {
 public:
  // Asks the system to permit the registers in all threads of the process. Returns 0 or an errno.
  static int32_t request() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // Linux' asm/prctl.h
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
#else
    return ENOSYS;
#endif
  }

  static void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  // Gives the registers back: the system saves and restores used ones at every switch of threads.
  static void release() { asm volatile("tilerelease"); }

  template <int C>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(C));
  }
  // Loads rows `stride` bytes apart.
  template <int R>
  static void load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
  }
  // The same for a factor that is used once, so that the other stays in the first level of cache.
  template <int R>
  static void load_once(const void* from, size_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
  }
  template <int R>
  static void store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(R) : "memory");
  }
  // C += A B, B in pairs of rows.
  template <int C, int A, int B>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // C += A B of int8, with B in fours of rows and C int32.
  template <int C, int A, int B>
  static void multiply_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace rootlace
