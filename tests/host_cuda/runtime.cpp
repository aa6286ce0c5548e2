// The scheduler behind include/execution.hpp: fibers, barriers, warp collectives.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <link.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "execution.hpp"

namespace cuda_on_host {

uint3 thread_index, block_index;
dim3 block_shape, grid_shape;

namespace {

// ------------------------------------------------------------------------------------ fibers

#ifdef __x86_64__
// swapcontext asks the kernel for the signal mask each time; this switch is ten instructions.
struct Context {
    void* stack_pointer;
};
extern "C" void cuda_on_host_switch(void** save, void* resume);
asm(R"(
.text
.local cuda_on_host_switch
.type cuda_on_host_switch, @function
cuda_on_host_switch:
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
.size cuda_on_host_switch, . - cuda_on_host_switch
)");
void switch_context(Context& from, Context& to) {
    cuda_on_host_switch(&from.stack_pointer, to.stack_pointer);
}
void start_context(Context& context, char* stack, size_t size, void (*entry)()) {
    // A frame as the switch leaves one: six registers, then the address to return to, placed so
    // that the entry finds the alignment of a called function.
    void** top = reinterpret_cast<void**>(stack + size) - 2;
    *top = reinterpret_cast<void*>(entry);
    std::memset(top - 6, 0, 6 * sizeof(void*));
    context.stack_pointer = top - 6;
}
#else
struct Context {
    ucontext_t state;
};
void switch_context(Context& from, Context& to) {
    swapcontext(&from.state, &to.state);
}
void start_context(Context& context, char* stack, size_t size, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = size;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}
#endif

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStack = 256 << 10;
#else
constexpr size_t kStack = 64 << 10;
#endif

enum class State { ready, at_barrier, at_exchange, polling, finished };

struct Fiber {
    Context context;
    State state;
    int line;
    unsigned mask;
    unsigned long long payload;
    void* fake_stack;
};

struct Warp {
    unsigned long long payload[32];
};

constexpr std::align_val_t kSharedAlignment{128};
struct AlignedDelete {
    void operator()(char* memory) const { operator delete[](memory, kSharedAlignment); }
};

struct Block {
    Launch launch;
    const void* parameters;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Context scheduler;
    void* scheduler_fake_stack;
    const void* scheduler_stack;
    size_t scheduler_stack_size;
    char* stacks;
    std::unique_ptr<char[], AlignedDelete> shared;
    int running;
    std::string failure;
};
Block block;

char* stack_of(int thread) {
    return block.stacks + size_t(thread) * kStack;
}

void to_scheduler() {
    Fiber& fiber = block.fibers[block.running];
#ifdef __SANITIZE_ADDRESS__
    bool ends = fiber.state == State::finished;
    __sanitizer_start_switch_fiber(ends ? nullptr : &fiber.fake_stack, block.scheduler_stack,
                                   block.scheduler_stack_size);
#endif
    switch_context(fiber.context, block.scheduler);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
#endif
}

void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_stack_size);
#endif
    block.launch(block.parameters);
    block.fibers[block.running].state = State::finished;
    to_scheduler();
}

void resume(int thread) {
    block.running = thread;
    thread_index = {thread % block_shape.x, thread / block_shape.x % block_shape.y,
                    thread / (block_shape.x * block_shape.y)};
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&block.scheduler_fake_stack, stack_of(thread), kStack);
#endif
    switch_context(block.scheduler, block.fibers[thread].context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(block.scheduler_fake_stack, nullptr, nullptr);
#endif
}

// -------------------------------------------------------------------------------- scheduling

unsigned present(int warp) {
    int lanes = int(block.fibers.size()) - 32 * warp;
    return lanes >= 32 ? ~0u : (1u << lanes) - 1;
}

std::string describe(int thread) {
    const Fiber& fiber = block.fibers[thread];
    std::string text = "thread " + std::to_string(thread);
    switch (fiber.state) {
        case State::finished:
            return text + " has returned";
        case State::at_barrier:
            return text + " waits at __syncthreads, line " + std::to_string(fiber.line);
        case State::at_exchange:
            return text + " waits for its warp, line " + std::to_string(fiber.line);
        case State::polling:
            return text + " waits for what no thread does";
        default:
            return text + " can run";
    }
}

// The order of the warps of a block and of the lanes of a warp, from one barrier to the next.
struct Order {
    enum Kind { forward, reverse, random };

    std::vector<int> warps, lanes;

    Order(Kind kind, int warp_count, unsigned seed)
        : warps(warp_count), lanes(32), kind_(kind), generator_(seed) {
        for (std::vector<int>* numbers : {&warps, &lanes}) {
            std::iota(numbers->begin(), numbers->end(), 0);
            if (kind == reverse) std::reverse(numbers->begin(), numbers->end());
        }
    }

    void next() {
        if (kind_ != random) return;
        std::shuffle(warps.begin(), warps.end(), generator_);
        std::shuffle(lanes.begin(), lanes.end(), generator_);
    }

  private:
    Kind kind_;
    std::mt19937 generator_;
};

// Lets every fiber that waits for a lane of its warp go on if all lanes of its mask have come.
bool release_warp(int warp) {
    bool any = false;
    Fiber* lanes = &block.fibers[32 * warp];
    unsigned exist = present(warp);
    for (int i = 0; i < 32 && (exist >> i & 1); ++i) {
        if (lanes[i].state != State::at_exchange) continue;
        unsigned mask = lanes[i].mask & exist;
        bool complete = mask >> i & 1;
        for (int j = 0; j < 32; ++j)
            if (mask >> j & 1)
                complete &= lanes[j].state == State::at_exchange &&
                            lanes[j].line == lanes[i].line && lanes[j].mask == lanes[i].mask;
        if (!complete) continue;
        for (int j = 0; j < 32; ++j)
            if (mask >> j & 1) {
                block.warps[warp].payload[j] = lanes[j].payload;
                lanes[j].state = State::ready;
            }
        any = true;
    }
    return any;
}

bool release_barrier() {
    for (const Fiber& fiber : block.fibers)
        if (fiber.state != State::at_barrier || fiber.line != block.fibers[0].line) return false;
    for (Fiber& fiber : block.fibers) fiber.state = State::ready;
    return true;
}

// Lets every fiber that polls look again; false if there is none.
bool release_polls() {
    bool any = false;
    for (Fiber& fiber : block.fibers)
        if (fiber.state == State::polling) {
            fiber.state = State::ready;
            any = true;
        }
    return any;
}

// The first thread, and the first one that is not where it is: the two sides of a divergence.
std::string divergence() {
    const Fiber& first = block.fibers[0];
    for (size_t i = 1; i < block.fibers.size(); ++i)
        if (block.fibers[i].state != first.state || block.fibers[i].line != first.line)
            return describe(0) + " while " + describe(int(i));
    return describe(0) + ", and no other thread can release it";
}

// Runs a warp until all its threads have ended or wait for the block, or wait for each other in
// vain.
void run_warp(int warp, const std::vector<int>& lanes) {
    int exist = std::min(int(block.fibers.size()) - 32 * warp, 32);
    do {
        for (int lane : lanes)
            if (lane < exist && block.fibers[32 * warp + lane].state == State::ready)
                resume(32 * warp + lane);
    } while (release_warp(warp));
}

// The warps run one after another, each as far as it can: where nothing makes them wait, one is far
// ahead of the others.
void run_block(Order& order) {
    for (size_t i = 0; i < block.fibers.size(); ++i) {
        block.fibers[i].state = State::ready;
#ifdef __SANITIZE_ADDRESS__
        // Frames that an earlier block left here were never unwound.
        __asan_unpoison_memory_region(stack_of(int(i)), kStack);
#endif
        start_context(block.fibers[i].context, stack_of(int(i)), kStack, fiber_main);
    }
    constexpr int kMostPolls = 1000;  // without a barrier of the block between them
    int polls = 0;
    while (true) {
        order.next();
        for (int warp : order.warps) run_warp(warp, order.lanes);
        bool all_finished = true;
        for (const Fiber& fiber : block.fibers) all_finished &= fiber.state == State::finished;
        if (!block.failure.empty() || all_finished) return;
        if (release_barrier()) {
            polls = 0;
        } else if (++polls > kMostPolls || !release_polls()) {
            block.failure = divergence();
            return;
        }
    }
}

// ------------------------------------------------------------------------------ shared memory

// Both bytes of 0xffff are a NaN's in all four floating-point types.
constexpr int kPoison = 0xff;

struct ThreadLocal {
    char* begin;
    size_t size;
};

// Lies in the thread-local block of this library, among the kernel's static __shared__ variables.
thread_local char anchor;

// A thread's copy of a library's thread-local block is found by the variable known to be in it.
int match_thread_local(dl_phdr_info* info, size_t, void* result) {
    auto begin = static_cast<char*>(info->dlpi_tls_data);
    for (int i = 0; begin && i < info->dlpi_phnum; ++i) {
        size_t size = info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type == PT_TLS && &anchor >= begin && &anchor < begin + size) {
            *static_cast<ThreadLocal*>(result) = {begin, size};
            return 1;
        }
    }
    return 0;
}

ThreadLocal find_static_shared() {
    anchor = 0;  // the first use allocates the thread's copy
    ThreadLocal found{};
    dl_iterate_phdr(match_thread_local, &found);
    return found;
}

}  // namespace

// ------------------------------------------------------------------------- called by the kernel

void* dynamic_shared() {
    return block.shared.get();
}

unsigned lane() {
    return unsigned(block.running) % 32;
}
unsigned present_lanes() {
    return present(block.running / 32);
}

void fail(const char* message) {
    if (block.failure.empty()) block.failure = message;
}

void block_barrier(int line) {
    Fiber& fiber = block.fibers[block.running];
    fiber.state = State::at_barrier;
    fiber.line = line;
    to_scheduler();
}

void poll() {
    block.fibers[block.running].state = State::polling;
    to_scheduler();
}

const unsigned long long* exchange(unsigned mask, unsigned long long payload, int line) {
    Fiber& fiber = block.fibers[block.running];
    fiber.state = State::at_exchange;
    fiber.line = line;
    fiber.mask = mask;
    fiber.payload = payload;
    to_scheduler();
    return block.warps[block.running / 32].payload;
}

}  // namespace cuda_on_host

// ---------------------------------------------------------------------------- called by the tests

// Runs a grid, the threads of a block in an `Order::Kind`. Returns null, or what went wrong in the
// first block that failed.
extern "C" __attribute__((visibility("default"))) const char* cuda_on_host_launch(
    cuda_on_host::Launch launch, const void* parameters, const unsigned* grid,
    const unsigned* threads, size_t shared_bytes, int order, unsigned seed) {
    using namespace cuda_on_host;
    grid_shape = {grid[0], grid[1], grid[2]};
    block_shape = {threads[0], threads[1], threads[2]};
    int count = int(threads[0] * threads[1] * threads[2]);

    block.launch = launch;
    block.parameters = parameters;
    block.failure.clear();
    block.fibers.assign(count, Fiber{});
    block.warps.assign((count + 31) / 32, Warp{});
    block.shared.reset(new (kSharedAlignment) char[shared_bytes]);
    size_t stack_bytes = count * kStack;
    block.stacks = static_cast<char*>(mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (block.stacks == MAP_FAILED) return "no memory for the stacks of the fibers";
    ThreadLocal statics = find_static_shared();

    Order sequence(static_cast<Order::Kind>(order), int(block.warps.size()), seed);
    for (unsigned z = 0; z < grid[2]; ++z)
        for (unsigned y = 0; y < grid[1]; ++y)
            for (unsigned x = 0; x < grid[0] && block.failure.empty(); ++x) {
                block_index = {x, y, z};
                std::memset(block.shared.get(), kPoison, shared_bytes);
                std::memset(statics.begin, kPoison, statics.size);
                run_block(sequence);
            }
    munmap(block.stacks, stack_bytes);
    block.shared.reset();
    return block.failure.empty() ? nullptr : block.failure.c_str();
}
