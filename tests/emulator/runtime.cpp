// Runs one kernel: a fiber for each thread of a threadgroup, one threadgroup after another. The checked build of a kernel calls
// the load and store hooks of ThreadSanitizer's ABI, which are defined here and see every access; the counted build calls
// SanitizerCoverage's. Nothing of either project's runtime is linked, and no C++ library, whose first build would take minutes.
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#define REGISTERS 7
#elif defined(__aarch64__)
#define REGISTERS 20
#else
#error "the fiber switch is written for x86-64 and arm64 only"
#endif
#if defined(__APPLE__)
#define SYMBOL(name) "_" #name
#else
#define SYMBOL(name) #name
#endif

// switch_stack(save, load): keep the callee-saved registers on this stack, store its top at *save, go on from `load`.
extern "C" void switch_stack(void** save, void* load);
#if defined(__x86_64__)
asm(".text\n.globl " SYMBOL(switch_stack) "\n" SYMBOL(switch_stack) ":\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\nmov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
#else
asm(".text\n.p2align 2\n.globl " SYMBOL(switch_stack) "\n" SYMBOL(switch_stack) ":\n"
    "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\n"
    "stp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\nmov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\n"
    "ldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\nadd sp, sp, #160\nret\n");
#endif

typedef uint32_t uint3 __attribute__((ext_vector_type(3)));
struct Ids {
  uint3 in_threadgroup, threadgroup_in_grid, in_grid;
  uint32_t lane, simd;
};
struct Words {
  uint32_t w[6];
};
extern "C" void emu_entry(void** buffers, const Ids* ids);  // the kernel

namespace {
constexpr size_t STACK = 256 << 10, SLOT = size_t(1) << 32, SLOTS = 24, SLICES = 64, ERRORS = 24, ARENA = 32 << 10, MOST_THREADS = 1024, MOST_BLOCKS = 4096;
enum State { READY, AT_SIMD, AT_BARRIER, DONE };
enum Kind { FREE, INPUT, OUTPUT };
constexpr int mem_threadgroup = 2;

struct Fiber {
  void* top;
  State state;
  int site, flags;
  Ids ids;
  size_t declared;  // threadgroup arrays this thread has met
  uint32_t met;     // simd operations so far
};
struct Buffer {
  Kind kind;
  size_t bytes;
  uint32_t* writer;  // thread + 1 of each byte, for outputs
  uint64_t requested, unique, unique_group, unique_simd;
  uint8_t* seen;  // with counting on: whether each byte was touched at all, by this group, by each simdgroup of it
  uint32_t* group_stamp;
  uint32_t* simd_stamp[MOST_THREADS / 32];
};
struct Shadow {  // one byte of threadgroup memory
  uint32_t writer, write_epoch, write_simd_epoch;
  uint32_t reader[2], read_epoch[2], read_simd_epoch[2];
};
struct Slice {
  size_t offset, bytes;
};

char* base;
char* stacks;
Buffer buffers[SLOTS];
void* pointers[SLOTS];
Fiber fibers[MOST_THREADS];
Words published[2][MOST_THREADS];  // in turn: a lane may be one operation ahead of its slowest neighbour
alignas(16) char arena[ARENA];
Shadow shadow[ARENA];
Slice slices[SLICES];
size_t slice_count, arena_used;
uint32_t epoch, group_epoch, simd_epoch[MOST_THREADS / 32];
uint32_t threads, group, current;
void* scheduler_top;
bool counting, failed;
uint64_t barriers, meetings, peak_arena;
char errors[ERRORS][192];
int error_count;
uint64_t blocks[MOST_BLOCKS];  // plain, because it is filled before constructors run
uint32_t block_count;

template <typename T>
T* zeros(size_t n) {
  return (T*)calloc(n ? n : 1, sizeof(T));
}

void complain(const char* format, ...) {
  char line[sizeof errors[0]];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  // Three of a kind (what stands before the colon), so that a flood of one fault does not hide another.
  const size_t kind = strcspn(line, ":");
  int alike = 0;
  for (int i = 0; i < error_count; i++) {
    if (!strcmp(errors[i], line)) return;
    alike += !strncmp(errors[i], line, kind + 1);
  }
  if (alike < 3 && error_count < int(ERRORS)) memcpy(errors[error_count++], line, sizeof line);
}

void complain_here(const char* what) { complain("%s: thread %u of group %u", what, current, group); }

void fatal(const char* what, uint64_t number) {
  fprintf(stderr, "%s: %llu", what, (unsigned long long)number);
  exit(70);
}

void pause(State state, int site, int flags) {
  Fiber& f = fibers[current];
  f.state = state;
  f.site = site;
  f.flags = flags;
  switch_stack(&f.top, scheduler_top);
}

void trampoline() {
  for (;;) {
    emu_entry(pointers, &fibers[current].ids);
    pause(DONE, 0, 0);
  }
}

void prepare_fiber(uint32_t i) {
  void** top = (void**)(stacks + (i + 1) * STACK - 72);  // 8 past a multiple of 16, as after a call
#if defined(__x86_64__)
  top[0] = nullptr;
  top[-1] = (void*)trampoline;
  fibers[i].top = top - 1 - 6;
#else
  top -= REGISTERS + 1;
  memset(top, 0, REGISTERS * sizeof(void*));
  top[11] = (void*)trampoline;  // x30
  fibers[i].top = top;
#endif
  fibers[i].state = READY;
  fibers[i].declared = fibers[i].met = 0;
}

void touch(Buffer& b, size_t at, size_t size) {
  b.requested += size;
  if (!b.seen) {
    b.seen = zeros<uint8_t>(b.bytes);
    b.group_stamp = zeros<uint32_t>(b.bytes);
    for (uint32_t i = 0; i <= (threads - 1) / 32; i++) b.simd_stamp[i] = zeros<uint32_t>(b.bytes);
  }
  uint32_t* mine = b.simd_stamp[current / 32];
  for (size_t i = at; i < at + size; i++) {
    b.unique += !b.seen[i];
    b.seen[i] = 1;
    b.unique_group += b.group_stamp[i] != group + 1;
    b.group_stamp[i] = group + 1;
    b.unique_simd += mine[i] != group + 1;
    mine[i] = group + 1;
  }
}

void device_access(char* address, size_t size, bool write) {
  const size_t slot = (address - base) / SLOT, at = (address - base) % SLOT;
  Buffer& b = buffers[slot];
  const auto fault = [&](const char* what) {
    complain("%s: buffer %zu at byte %zu by thread %u of group %u", what, slot, at, current, group);
  };
  if (b.kind == FREE || at + size > b.bytes) return fault("out of bounds");
  if (at % size) fault("misaligned");
  if (counting) touch(b, at, size);
  if (b.kind == INPUT) {
    if (write) fault("store to an input");
    return;
  }
  const uint32_t self = group * threads + current + 1;
  for (size_t i = at; i < at + size; i++) {
    if (write && b.writer[i]) fault("stored twice");
    if (!write && b.writer[i] != self) fault("load of an output this thread has not stored");
    if (write) b.writer[i] = self;
  }
}

bool ordered(uint32_t other, uint32_t its_epoch, uint32_t its_simd_epoch) {
  return other == current || its_epoch != epoch || (other / 32 == current / 32 && its_simd_epoch != simd_epoch[current / 32]);
}

void shared_access(size_t at, size_t size, bool write) {
  const auto fault = [&](const char* what) {
    complain("%s: threadgroup byte %zu by thread %u of group %u", what, at, current, group);
  };
  if (at % size) fault("misaligned");
  bool inside = false;
  for (size_t i = 0; i < slice_count; i++)
    inside |= at >= slices[i].offset && at + size <= slices[i].offset + slices[i].bytes;
  if (!inside) return fault("out of bounds");
  const uint32_t now = simd_epoch[current / 32];
  for (size_t i = at; i < at + size; i++) {
    Shadow& s = shadow[i];
    const bool written = s.write_epoch >= group_epoch;
    if (!write && !written) fault("uninitialised");
    if (written && !ordered(s.writer, s.write_epoch, s.write_simd_epoch))
      fault(write ? "race (store after store)" : "race (load after store)");
    if (write) {
      for (int r = 0; r < 2; r++)
        if (s.read_epoch[r] >= group_epoch && !ordered(s.reader[r], s.read_epoch[r], s.read_simd_epoch[r]))
          fault("race (store after load)");
      s.writer = current;
      s.write_epoch = epoch;
      s.write_simd_epoch = now;
      continue;
    }
    // Two different readers of the present epoch are enough to convict any later writer.
    const int r = s.read_epoch[0] == epoch && s.reader[0] != current ? 1 : 0;
    s.reader[r] = current;
    s.read_epoch[r] = epoch;
    s.read_simd_epoch[r] = now;
  }
}

void access(void* pointer, size_t size, bool write) {
  char* p = (char*)pointer;
  if (p >= base && p < base + SLOTS * SLOT) return device_access(p, size, write);
  if (p >= arena && p < arena + ARENA) return shared_access(p - arena, size, write);
  if (p < stacks + current * STACK || p >= stacks + (current + 1) * STACK)
    if (write) complain_here("store to memory that is not this thread's");
}

bool release(uint32_t from, uint32_t to, State state, const char* what) {
  int site = -1;
  uint32_t waiting = 0;
  for (uint32_t i = from; i < to; i++) {
    if (fibers[i].state != state) continue;
    waiting++;
    if (site >= 0 && site != fibers[i].site) {
      complain("divergent %s: lines %d and %d in group %u", what, site, fibers[i].site, group);
      return false;
    }
    site = fibers[i].site;
  }
  if (waiting != to - from) return false;
  for (uint32_t i = from; i < to; i++) fibers[i].state = READY;
  return true;
}

// Lanes that wait at simd operations while the rest of their simdgroup went elsewhere.
void explain_stall() {
  failed = true;
  uint32_t simd = 0, barrier = 0, done = 0;
  int site = 0;
  for (uint32_t i = 0; i < threads; i++) {
    simd += fibers[i].state == AT_SIMD;
    barrier += fibers[i].state == AT_BARRIER;
    done += fibers[i].state == DONE;
    if (fibers[i].state == AT_SIMD || (fibers[i].state == AT_BARRIER && !simd)) site = fibers[i].site;
  }
  complain("divergent %s: line %d in group %u; %u threads at simd operations, %u at barriers, %u finished",
           simd ? "simd operation" : "barrier", site, group, simd, barrier, done);
}

bool turn(uint32_t order) {
  bool moved = false;
  const uint32_t simds = (threads + 31) / 32;
  for (uint32_t s = 0; s < simds; s++) {
    const uint32_t simd = (s * (order | 1) + order) % simds, from = simd * 32, to = from + 32 < threads ? from + 32 : threads;
    for (uint32_t i = from; i < to; i++) {
      current = order & 2 ? from + to - 1 - i : i;
      if (fibers[current].state != READY) continue;
      moved = true;
      switch_stack(&scheduler_top, fibers[current].top);
    }
    if (release(from, to, AT_SIMD, "simd operation")) {
      moved = true;
      simd_epoch[simd] += (fibers[from].flags & mem_threadgroup) != 0;
      meetings++;
    }
  }
  return moved;
}

void run_group(uint32_t index, uint32_t order) {
  group = index;
  group_epoch = ++epoch;
  slice_count = arena_used = 0;
  memset(arena, 0xff, ARENA);
  for (uint32_t i = 0; i < threads; i++) {
    prepare_fiber(i);
    fibers[i].ids = {{i, 0, 0}, {index, 0, 0}, {index * threads + i, 0, 0}, i % 32, i / 32};
  }
  for (;;) {
    const bool moved = turn(order);
    uint32_t done = 0;
    for (uint32_t i = 0; i < threads; i++) done += fibers[i].state == DONE;
    if (done == threads) return;
    if (moved) continue;
    const bool fence = fibers[0].flags & mem_threadgroup;
    if (!release(0, threads, AT_BARRIER, "barrier")) return explain_stall();
    barriers++;
    if (fence) epoch++;
  }
}
}  // namespace

extern "C" {
// clang calls this for float to bfloat: to the nearest, ties to even, NaN stays NaN.
__bf16 __truncsfbf2(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(__bf16, uint16_t(rounded >> 16));
}

void* emu_threadgroup(size_t bytes) {
  const size_t index = fibers[current].declared++;
  if (index == slice_count) {
    const size_t offset = (arena_used + 15) / 16 * 16;
    if (index == SLICES) fatal("more threadgroup arrays than the emulator holds", SLICES);
    slices[slice_count++] = {offset, bytes};
    arena_used = offset + bytes;
    if (arena_used > peak_arena) peak_arena = arena_used;
    if (arena_used > ARENA) fatal("more than 32768 bytes of threadgroup memory", arena_used);
  }
  if (slices[index].bytes != bytes) complain_here("threads disagree about a threadgroup array");
  return arena + slices[index].offset;
}
void emu_barrier(int site, int flags) { pause(AT_BARRIER, site, flags); }
uint32_t emu_lane() { return current % 32; }
const Words* emu_meet(int site, Words mine) {
  Words* all = published[fibers[current].met++ % 2];
  all[current] = mine;
  pause(AT_SIMD, site, 0);
  return all + current / 32 * 32;
}
void emu_simdgroup_barrier(int site, int flags) {
  pause(AT_SIMD, site, flags);
}
uint32_t emu_shuffle(int site, uint32_t value, uint32_t from) {
  const Words* all = emu_meet(site, {{value}});
  const uint32_t result = from < 32 ? all[from].w[0] : 0xffffffffu;
  if (from >= 32) complain("shuffle from lane %u: line %d", from, site);
  return result;
}

void* emu_bind(uint32_t slot, size_t bytes, int kind) {
  if (!base) {
    base = (char*)mmap(nullptr, SLOTS * SLOT, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    stacks = (char*)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || stacks == MAP_FAILED) abort();
  }
  char* start = base + slot * SLOT;
  mprotect(start, (bytes + 65535) / 65536 * 65536, PROT_READ | PROT_WRITE);
  if (kind == OUTPUT) memset(start, 0xff, bytes);
  Buffer& b = buffers[slot];
  free(b.writer);
  b = Buffer{Kind(kind), bytes, zeros<uint32_t>(kind == OUTPUT ? bytes : 0)};
  pointers[slot] = start;
  return start;
}

void emu_run(uint32_t first, uint32_t groups, uint32_t threads_, uint32_t order, int count) {
  threads = threads_;
  counting = count;
#if defined(__x86_64__)
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // denormals are zero, as on the GPU
#else
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  asm volatile("msr fpcr, %0" ::"r"(mode | (1 << 24)));
#endif
  for (uint32_t i = first; i < first + groups && !failed; i++) run_group(i, order ? order + i : 0);
#if defined(__x86_64__)
  _mm_setcsr(mode);
#else
  asm volatile("msr fpcr, %0" ::"r"(mode));
#endif
}

uint64_t emu_unwritten(uint32_t slot) {
  uint64_t missing = 0;
  for (size_t i = 0; i < buffers[slot].bytes; i++) missing += !buffers[slot].writer[i];
  return missing;
}
void emu_counts(uint32_t slot, uint64_t* four) {
  const Buffer& b = buffers[slot];
  four[0] = b.requested;
  four[1] = b.unique_simd;
  four[2] = b.unique_group;
  four[3] = b.unique;
}
void emu_totals(uint64_t* three) {
  three[0] = barriers;
  three[1] = meetings;
  three[2] = peak_arena;
}
uint32_t emu_blocks(uint64_t* out, uint32_t room) {
  for (uint32_t i = 0; i < room && i < block_count; i++) out[i] = blocks[i];
  return block_count;
}
const char* emu_errors() {
  static char all[sizeof errors];
  all[0] = 0;
  for (int i = 0; i < error_count; i++) strcat(strcat(all, errors[i]), "\n");
  return all;
}

#define HOOKS(n)                                                                \
  void __tsan_read##n(void* p) { access(p, n, false); }                         \
  void __tsan_write##n(void* p) { access(p, n, true); }                         \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false); }               \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true); }               \
  void __tsan_read_write##n(void* p) { access(p, n, false), access(p, n, true); } \
  void __tsan_unaligned_read_write##n(void* p) { access(p, n, false), access(p, n, true); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  for (size_t i = 0; i < n; i++) access((char*)from + i, 1, false), access((char*)to + i, 1, true);
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  for (size_t i = 0; i < n; i++) access((char*)to + i, 1, true);
  return memset(to, value, n);
}
void __ubsan_handle_out_of_bounds(void*, void*) { complain_here("array index out of bounds"); }
void __ubsan_handle_shift_out_of_bounds(void*, void*, void*) { complain_here("shift out of range"); }
void __ubsan_handle_divrem_overflow(void*, void*, void*) { fatal("division by zero in thread", current); }
void __sanitizer_cov_trace_pc_guard_init(uint32_t* start, uint32_t* stop) {
  for (uint32_t* guard = start; guard < stop; guard++) *guard = guard - start;
  block_count = stop - start;
  if (block_count > MOST_BLOCKS) abort();
}
void __sanitizer_cov_trace_pc_guard(uint32_t* guard) { blocks[*guard]++; }
}
