#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#ifdef __unix__
#include <sched.h>
#include <unistd.h>
#endif

#include "sizes.h"

namespace {

constexpr int SPINS = 1000;  // looks for work before a thread sleeps: some 50 microseconds

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A thread's share of what is being done, as one number, so that it is read and claimed at once: round, end, next part.
constexpr uint64_t NEXT_BITS = 20, END_BITS = 20;
constexpr uint64_t MAX_PARTS = (1u << NEXT_BITS) - 1;
inline uint64_t next_of(uint64_t state) { return state & MAX_PARTS; }
inline uint64_t end_of(uint64_t state) { return state >> NEXT_BITS & MAX_PARTS; }

struct alignas(64) Share {
    std::atomic<uint64_t> state{0};
};

struct Pool {
    Share shares[MAX_THREADS];     // of the calling thread, then of those started here
    std::atomic<int64_t> done{0};
    std::atomic<int> sleeping{0}, active{0};
    Work work = nullptr;           // of the present round: fixed while one of its parts is claimed and not done
    const void* context = nullptr;
    std::mutex mutex;
    std::condition_variable wake;
    int started = 0;
    uint64_t round = 0;

    bool take_part_of(Share& share) {
        uint64_t seen = share.state.load(std::memory_order_acquire);
        while (next_of(seen) < end_of(seen)) {
            if (!share.state.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            work(context, (int64_t)next_of(seen));
            done.fetch_add(1, std::memory_order_release);
            return true;
        }
        return false;
    }

    // Of its own share, whose parts follow each other in memory; then of the others'.
    bool take_part(int own, int threads) {
        for (int i = 0; i < threads; i++)
            if (take_part_of(shares[(own + i) % threads])) return true;
        return false;
    }

    bool has_work(int index) {
        int others = active.load(std::memory_order_seq_cst);
        for (int i = 0; index < others && i <= others; i++) {
            uint64_t seen = shares[i].state.load(std::memory_order_seq_cst);
            if (next_of(seen) < end_of(seen)) return true;
        }
        return false;
    }

    void serve(int index) {
        for (;;) {
            int spins = 0;
            while (!has_work(index) && spins < SPINS) pause_briefly(), spins++;
            if (spins == SPINS) {
                std::unique_lock<std::mutex> lock(mutex);
                sleeping.fetch_add(1, std::memory_order_seq_cst);
                wake.wait(lock, [&] { return has_work(index); });
                sleeping.fetch_sub(1, std::memory_order_seq_cst);
            }
            for (int others; index < (others = active.load(std::memory_order_relaxed)) && take_part(index + 1, others + 1);) {}
        }
    }

    void run(int64_t threads, int64_t parts, Work what, const void* of) {
        while (started < threads - 1) std::thread(&Pool::serve, this, started++).detach();
        active.store((int)threads - 1, std::memory_order_seq_cst);
        work = what, context = of;
        done.store(0, std::memory_order_relaxed);
        round++;
        for (int64_t i = 0; i < threads; i++) {
            uint64_t first = (uint64_t)(parts * i / threads), end = (uint64_t)(parts * (i + 1) / threads);
            shares[i].state.store(round << (NEXT_BITS + END_BITS) | end << NEXT_BITS | first, std::memory_order_seq_cst);
        }
        if (sleeping.load(std::memory_order_seq_cst)) {
            { std::lock_guard<std::mutex> lock(mutex); }
            wake.notify_all();
        }
        while (take_part(0, (int)threads)) {}
        for (int spins = 0; done.load(std::memory_order_acquire) < parts; spins++) {
            if (spins < SPINS) pause_briefly();
            else std::this_thread::yield();
        }
    }
};

std::mutex turn;  // one piece of work at a time, whoever calls

Pool* pool_of_process() {  // a process that was forked has none of its parent's threads
    static Pool* pool = nullptr;
    static long owner = 0;
#ifdef __unix__
    long self = (long)getpid();
#else
    long self = 1;
#endif
    if (!pool || owner != self) pool = new Pool, owner = self;
    return pool;
}

}  // namespace

void run_parts(int64_t threads, int64_t parts, Work work, const void* context) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads < 2 || parts < 2 || parts > (int64_t)MAX_PARTS) {
        for (int64_t part = 0; part < parts; part++) work(context, part);
        return;
    }
    std::lock_guard<std::mutex> lock(turn);
    pool_of_process()->run(threads, parts, work, context);
}
