// Runs kernels on one thread of the host. Each of their threads is a fiber, which runs until it waits: for
// the lanes of its warp, at a barrier, or for what another CTA publishes. Several clusters of a launch are
// resident at a time, as on a device. Their warps run in a random order. What is copied or sent
// asynchronously arrives at once, or after all threads wait. Launches of the same geometry have the same
// random numbers.
#include "emulator.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

// Saves the registers that a function must preserve and the stack pointer, and restores those of another
// fiber.
asm(R"(
.text
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void emulator_switch(void** save, void* to);

namespace emulator {

Thread* self;

namespace {

constexpr size_t kStack = 65 * 1024 + 64;    // not a multiple of a page, so that stacks share no cache sets
constexpr size_t kStaticShared = 48 * 1024;  // CUDA's limit
constexpr size_t kShared = 227 * 1024;       // of a CTA: static and dynamic
constexpr size_t kGuard = 4096;              // bytes after the shared memory that fault
constexpr int kClockStep = 100;              // cycles from one reading of the clock to the next
constexpr int kMaxIdleRounds = 1 << 12;      // in which threads only poll: more than any waits by the clock

// What a thread has sent or copied to the shared memory of a CTA, and the mbarrier that it signals.
struct Message {
  Cta* to;
  uint32_t at, mbarrier, bytes;
  const void* from;  // of a copy
  uint64_t value;    // of what is sent
};

}  // namespace

// It lies in 8 bytes of shared memory. `bytes` are expected and have not arrived.
struct Mbarrier {
  uint32_t parity : 1, expected : 12, pending : 12;
  int32_t bytes;
  void complete() {
    if (pending == 0 && bytes == 0) parity ^= 1, pending = expected;
  }
};
static_assert(sizeof(Mbarrier) == 8);

struct Cluster {
  std::vector<Cta> ctas;
  std::vector<Warp> warps;
  std::vector<Thread> threads;
  Phase phase;
  size_t live;                    // threads that have not ended
  std::vector<Message> messages;  // on their way
  char* stacks;
  std::vector<char*> shared;  // where the shared memory of each CTA ends
};

namespace {

const Launch* launch;
std::string error;
std::mt19937_64 random_bits;
void* scheduler;
int64_t cycles;

struct Variable {
  const void* key;
  size_t offset;
};
std::vector<Variable> variables;  // in static shared memory, which is laid out as they are met
size_t static_bytes;

bool can_run(const Thread& t) {
  if (t.phase) return t.phase->number != t.number;
  if (t.mbarrier) return t.mbarrier->parity != t.number;
  return !t.ended && !t.polls;
}

void leave() { emulator_switch(&self->stack, scheduler); }

void arrive(Phase& phase) {
  if (++phase.arrived == phase.expected) phase.arrived = 0, phase.number++;
}

void wait(const Phase& phase, uint64_t number, const char* where) {
  if (phase.number != number) return;
  self->phase = &phase, self->number = number, self->where = where;
  leave();
  self->phase = nullptr;
}

// A thread has ended: barriers no longer expect it.
void drop(Phase& phase) {
  if (--phase.expected > 0 && phase.arrived == phase.expected) phase.arrived = 0, phase.number++;
}

Mbarrier& mbarrier(Cta& cta, uint32_t at) {
  Mbarrier& b = *reinterpret_cast<Mbarrier*>(cta.memory + at);
  if (at % sizeof(b)) fail("an mbarrier is misaligned");
  if (b.expected == 0xfff) fail("an mbarrier is not initialized");
  return b;
}

void arrive(uint32_t at, uint32_t bytes) {
  Mbarrier& b = mbarrier(*self->cta, at);
  if (b.pending == 0) fail("more arrive at an mbarrier than it expects");
  b.bytes += bytes, b.pending--;
  b.complete();
}

void deliver(const Message& m) {
  if (m.to->live == 0) return fail("data arrives in a CTA that has ended");
  std::memcpy(m.to->memory + m.at, m.from ? m.from : &m.value, m.bytes);
  Mbarrier& b = mbarrier(*m.to, m.mbarrier);
  b.bytes -= m.bytes;
  b.complete();
}

void post(const Message& m) {
  if (random_bits() & 1) deliver(m);
  else self->cta->cluster->messages.push_back(m);
}

// Where a fiber begins.
void enter() {
  launch->kernel->body(launch->args);
  Cluster& cluster = *self->cta->cluster;
  Cta& cta = *self->cta;
  self->ended = true;
  cta.live--, cluster.live--;
  drop(self->warp->phase), drop(cta.phase), drop(cluster.phase);
  leave();
}

// Memory that ends with a page that faults.
char* map(size_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const p = mmap(nullptr, bytes + kGuard, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (p == MAP_FAILED || mprotect(static_cast<char*>(p) + bytes, kGuard, PROT_NONE))
    std::perror("emulator: mmap"), std::abort();
  return static_cast<char*>(p);
}

void start(Cluster& c, unsigned index) {
  constexpr unsigned kMaxCTAs = 16, kMaxThreads = 1024;
  constexpr size_t kMemory = kStaticShared + kShared + 1024;
  const unsigned threads = launch->threads, count = threads * launch->cluster;
  if (!c.stacks) {  // memory is kept from launch to launch
    c.stacks = map((kMaxCTAs * kMaxThreads * kStack + kGuard - 1) / kGuard * kGuard);
    for (unsigned i = 0; i < kMaxCTAs; i++) c.shared.push_back(map(kMemory) + kMemory);
  }
  c.ctas.assign(launch->cluster, {});
  c.warps.assign(count / 32, {{32, 0, 0}, {}});
  c.threads.assign(count, {});
  c.phase = {count, 0, 0};
  c.live = count;
  for (unsigned rank = 0; rank < launch->cluster; rank++) {
    const size_t bytes = kStaticShared + (launch->shared + 15) / 16 * 16;
    Cta& cta = c.ctas[rank];
    cta.cluster = &c, cta.rank = rank, cta.index = {index, rank, 0};
    cta.threads = dim3(threads), cta.grid = dim3(launch->clusters, launch->cluster);
    cta.phase = {threads, 0, 0}, cta.live = threads;
    cta.memory = c.shared[rank] - bytes;
    std::memset(cta.memory, 0xff, bytes);  // NaN, and no valid index
  }
  for (unsigned i = 0; i < count; i++) {
    Thread& t = c.threads[i];
    t.cta = &c.ctas[i / threads], t.warp = &c.warps[i / 32], t.index = {i % threads, 0, 0}, t.lane = i % 32;
    // What emulator_switch takes from a stack: six registers, and `enter` as the address to return to.
    const uintptr_t top = reinterpret_cast<uintptr_t>(c.stacks + (i + 1) * kStack) & ~uintptr_t(63);
    reinterpret_cast<void**>(top)[-2] = reinterpret_cast<void*>(enter);
    t.stack = reinterpret_cast<void**>(top) - 8;
  }
}

// The order in which the threads of a cluster run: warp by warp, or all first lanes before the second ones,
// from another warp on each time. The latter finds a lane that signals for its warp before the other lanes
// are done.
struct Order {
  std::vector<unsigned> warps;
  bool by_lanes, backwards;
};

// Runs a cluster until all of its threads wait. Returns whether one did more than to poll.
bool visit(Cluster& c, const Order& order) {
  bool progress = false;
  for (Thread& t : c.threads) t.polls = false;
  const auto run_lane = [&](unsigned warp, unsigned lane) {
    Thread& t = c.threads[warp * 32 + (order.backwards ? 31 - lane : lane)];
    if (!error.empty() || !can_run(t)) return false;
    self = &t;
    emulator_switch(&scheduler, t.stack);
    self = nullptr;
    progress |= !t.polls;
    return true;
  };
  const auto run_warp = [&](unsigned warp) {
    bool any = false;
    for (unsigned lane = 0; lane < 32; lane++) any |= run_lane(warp, lane);
    return any;
  };
  const size_t warps = order.warps.size();
  for (bool any = true; any;) {
    any = false;
    if (order.by_lanes)
      for (size_t lane = 0, first = random_bits() % warps; lane < 32; lane++)
        for (size_t i = 0; i < warps; i++) any |= run_lane(order.warps[(first + i) % warps], lane);
    else
      for (unsigned warp : order.warps)
        while (run_warp(warp)) any = true;
  }
  return progress;
}

// Delivers half of the messages, in any order.
bool deliver_some(Cluster& c) {
  if (c.messages.empty()) return false;
  std::shuffle(c.messages.begin(), c.messages.end(), random_bits);
  const std::vector<Message> now(c.messages.begin() + c.messages.size() / 2, c.messages.end());
  c.messages.resize(c.messages.size() / 2);
  for (const Message& m : now) deliver(m);
  return true;
}

// Memory that is not allocated faults.
void touch(const void* p) { static_cast<void>(*static_cast<const volatile char*>(p)); }

void report_deadlock(const std::vector<Cluster>& clusters) {
  for (const Cluster& c : clusters)
    for (const Thread& t : c.threads)
      if (c.live && !t.ended)
        return fail("deadlock: thread %u of CTA %u, rank %u, waits %s", t.index.x, t.cta->index.x,
                    t.cta->rank, t.polls ? "for another CTA" : t.where);
}

// A fiber that has accessed memory that it must not access continues here.
const void* fault_address;
void after_fault() {
  fail("an access to %p: misaligned, or outside of all allocations", fault_address);
  leave();
}

struct sigaction previous;

void on_fault(int signal, siginfo_t* info, void* context) {
  if (!self) {
    sigaction(signal, &previous, nullptr);  // not a kernel's: it occurs again
    return;
  }
  fault_address = info->si_addr;
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  registers[REG_RIP] = reinterpret_cast<greg_t>(after_fault);
  registers[REG_RSP] = (registers[REG_RSP] - 256) & ~greg_t(15) | 8;
}

}  // namespace

// ---- What kernels call.

void fail(const char* format, ...) {
  if (!error.empty()) return;
  char text[256];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  error = text;
  if (self) {
    const uint3 cta = self->cta->index;
    std::snprintf(text, sizeof(text), " (thread %u of CTA %u, rank %u)", self->index.x, cta.x, cta.y);
    error += text;
  }
}

void check_alignment(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) fail("an access of %zu bytes is misaligned", bytes);
}

void check_read(const void* p, size_t bytes) {
  check_alignment(p, bytes);
  const auto next = surroundings().upper_bound(static_cast<const char*>(p));
  if (next != surroundings().end() && next->second < static_cast<const char*>(p) + bytes)
    fail("a load of %zu bytes from %p, which is no allocation's", bytes, p);
}

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  const auto found = std::find_if(variables.begin(), variables.end(), [=](auto& v) { return v.key == key; });
  if (found != variables.end()) return self->cta->memory + found->offset;
  const size_t offset = (static_bytes + alignment - 1) / alignment * alignment;
  variables.push_back({key, offset});
  static_bytes = offset + bytes;
  if (static_bytes > kStaticShared) fail("%zu bytes of static shared memory", static_bytes);
  if (static_bytes + launch->shared > kShared)
    fail("%zu bytes of shared memory", static_bytes + launch->shared);
  return self->cta->memory + offset;
}

void* dynamic_shared() { return self->cta->memory + kStaticShared; }

uint32_t shared_address(const void* p) { return static_cast<const char*>(p) - self->cta->memory; }

void sync_warp() {
  Phase& phase = self->warp->phase;
  const uint64_t number = phase.number;
  arrive(phase);
  wait(phase, number, "for the lanes of its warp");
}

int sync_cta_or(int predicate) {
  Cta& cta = *self->cta;
  const uint64_t number = cta.phase.number;
  bool& any = cta.any[number & 1];
  if (cta.phase.arrived == 0) any = false;
  any |= predicate != 0;
  arrive(cta.phase);
  wait(cta.phase, number, "at __syncthreads");
  return any;
}

void named_arrive(int barrier, int threads) {
  Phase& phase = self->cta->named[barrier];
  phase.expected = threads;
  arrive(phase);
}

void named_sync(int barrier, int threads) {
  const Phase& phase = self->cta->named[barrier];
  const uint64_t number = phase.number;
  named_arrive(barrier, threads);
  wait(phase, number, "at a named barrier");
}

int64_t clock() { return cycles += kClockStep; }

void load_words_if(bool in, const void* p, int count, unsigned* const (&words)[4]) {
  if (!in) return;
  check_read(p, count * sizeof(unsigned));
  for (int i = 0; i < count; i++) *words[i] = static_cast<const unsigned*>(p)[i];
}

void thread_number(uint32_t& number) { number = self->index.x; }
void cluster_rank(uint32_t& rank) { rank = self->cta->rank; }
void cluster_size(uint32_t& size) { size = launch->cluster; }

void cluster_arrive() {
  Phase& phase = self->cta->cluster->phase;
  if (self->arrived) fail("a second arrival at the cluster's barrier without a wait");
  self->arrived = true, self->cluster_phase = phase.number;
  arrive(phase);
}

void cluster_wait() {
  if (!self->arrived) fail("a wait at the cluster's barrier without an arrival");
  self->arrived = false;
  wait(self->cta->cluster->phase, self->cluster_phase, "at the cluster's barrier");
}

void barrier_init(uint32_t barrier, unsigned count) {
  if (barrier % sizeof(Mbarrier)) fail("an mbarrier is misaligned");
  *reinterpret_cast<Mbarrier*>(self->cta->memory + barrier) = {0, count, count, 0};
}

void barrier_expect(uint32_t barrier, uint32_t bytes) { arrive(barrier, bytes); }

void barrier_arrive(uint32_t barrier) { arrive(barrier, 0); }

void barrier_wait(uint32_t barrier, uint32_t parity) {
  const Mbarrier& b = mbarrier(*self->cta, barrier);
  if (b.parity != parity) return;
  self->mbarrier = &b, self->number = parity, self->where = "at an mbarrier";
  leave();
  self->mbarrier = nullptr;
}

void send(uint32_t slot, uint32_t barrier, uint64_t value, uint32_t rank) {
  Cluster& cluster = *self->cta->cluster;
  if (rank >= cluster.ctas.size()) return fail("a store to rank %u of %zu", rank, cluster.ctas.size());
  post({&cluster.ctas[rank], slot, barrier, sizeof(value), nullptr, value});
}

void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  const char* const last = static_cast<const char*>(from) + bytes - 16;
  if (to % 16 || bytes % 16 || bytes == 0) return fail("a bulk copy is misaligned");
  if (to + bytes > kStaticShared + launch->shared) return fail("a bulk copy passes the end of shared memory");
  check_read(from, 16), check_read(last, 16);
  touch(from), touch(last);  // now, because the copy may be made while no thread runs
  post({self->cta, to, barrier, bytes, from, 0});
}

void prefetch(uintptr_t from, uint32_t bytes) {
  if (from % 16 || bytes % 16 || bytes == 0) return fail("a prefetch is misaligned");
  touch(reinterpret_cast<const void*>(from)), touch(reinterpret_cast<const void*>(from + bytes - 16));
}

void copy_async(uint32_t to, const void* from, int bytes, int size) {
  if (to % size) return fail("an asynchronous copy is misaligned");
  check_alignment(from, size);
  if (self->copies.empty()) self->copies.emplace_back();
  self->copies.back().push_back({to, from, bytes, size});
}

void copies_commit() {
  if (self->copies.empty()) self->copies.emplace_back();
  self->copies.emplace_back();
}

void copies_wait(unsigned pending) {
  auto& groups = self->copies;
  while (groups.size() > pending + 1) {
    for (const Copy& c : groups.front()) {
      char* const to = self->cta->memory + c.to;
      std::memcpy(to, c.from, c.bytes);
      std::memset(to + c.bytes, 0, c.size - c.bytes);
    }
    groups.erase(groups.begin());
  }
}

void publish(ulonglong2* slot, uint64_t x, uint64_t y) {
  check_alignment(slot, sizeof(*slot));
  *slot = {x, y};
}

// Other CTAs run before a thread gets from a slot what it has got before.
void poll(unsigned long long& x, unsigned long long& y, const ulonglong2* slot) {
  Thread& t = *self;
  if (t.polled == slot && t.found.x == slot->x && t.found.y == slot->y) {
    t.polls = true;
    leave();
  }
  t.polled = slot, t.found = *slot;
  x = t.found.x, y = t.found.y;
}

// ---- Launches.

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

std::map<const char*, const char*>& surroundings() {
  static std::map<const char*, const char*> all;
  return all;
}

std::string run(const Launch& l) {
  static std::vector<Cluster> clusters;
  launch = &l;
  error.clear(), variables.clear(), static_bytes = 0;
  random_bits.seed(l.clusters + 64 * l.cluster + l.threads + l.shared);
  const auto shuffled = [](unsigned count) {
    std::vector<unsigned> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), random_bits);
    return numbers;
  };
  const std::vector<unsigned> blocks = shuffled(l.clusters);
  const Order order = {shuffled(l.threads * l.cluster / 32), random_bits() % 4 == 0, random_bits() % 2 == 0};
  const unsigned resident = std::min(std::max(l.resident / l.cluster, 1u), l.clusters);
  if (clusters.size() < resident) clusters.resize(resident);
  struct sigaction action = {};
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &previous);
  int idle = 0;
  for (size_t ended = 0, next = 0; ended < blocks.size() && error.empty();) {
    bool progress = false;
    for (unsigned i = 0; i < resident && error.empty(); i++) {
      Cluster& c = clusters[i];
      if (c.live == 0 && next < blocks.size()) start(c, blocks[next++]);
      if (c.live == 0) continue;
      progress |= visit(c, order);
      if (c.live == 0) ended++, progress = true;
      if (c.live == 0 && !c.messages.empty()) fail("data arrives in a CTA that has ended");
    }
    if (progress) idle = 0;
    else {
      bool delivered = false, polls = false;
      for (unsigned i = 0; i < resident; i++) {
        delivered |= deliver_some(clusters[i]);
        for (const Thread& t : clusters[i].threads) polls |= t.polls;
      }
      if (!delivered && (!polls || ++idle > kMaxIdleRounds)) report_deadlock(clusters);
    }
  }
  sigaction(SIGSEGV, &previous, nullptr);
  for (Cluster& c : clusters) c.live = 0, c.messages.clear();
  l.kernel->launches++;
  return error;
}

}  // namespace emulator
