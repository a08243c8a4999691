// Whether this process may use matrix tiles.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace draftwire {

// Linux hands out the large register state on request alone (arch_prctl, since 5.16), to all
// threads of the process. It may refuse, for instance where a thread's signal stack is too small.
inline bool tiles_permitted() {
#if defined(__x86_64__) && defined(__linux__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if (!(d & amx_bf16) || !(d & amx_tile)) return false;
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

}  // namespace draftwire
