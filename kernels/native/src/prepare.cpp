// What the process must do before it uses this library's instructions.
#include "api.h"

#if defined(__AMX_BF16__) && defined(__linux__) && !defined(ROOTLACE_TWIN)
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// From Linux' asm/prctl.h, which older systems do not have.
constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;

}  // namespace

extern "C" int32_t rl_prepare() {
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
}
#else
extern "C" int32_t rl_prepare() { return 0; }
#endif
