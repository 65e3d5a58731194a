// Work shared by a few threads; the result of an item never depends on the thread that takes it.
//
// On Linux the work runs on PyTorch's threads: the caller passes GOMP_parallel from the OpenMP library that PyTorch
// loaded. Linking OpenMP here could load a second copy, whose threads would compete with PyTorch's; without it, this
// library runs wherever PyTorch does. If the function is missing, one thread does the work. On other systems the work
// runs on threads of the C++ standard library.

#ifndef MAMBACL_THREADS_H
#define MAMBACL_THREADS_H

#include <atomic>
#ifndef __linux__
#include <thread>
#include <vector>
#endif

typedef void (*Parallel)(void (*member)(void*), void* team, unsigned threads, unsigned flags);

namespace {

struct Team {
    void (*work)(const void* context, long long item, void* memory);
    const void* context;
    long long items, bytes;  // `bytes` of memory per thread, aligned for the widest vectors
    std::atomic<long long> next;
    std::atomic<bool> failed;
};

void member(void* data) {
    Team& team = *static_cast<Team*>(data);
    char* memory = static_cast<char*>(malloc(size_t(team.bytes + 64)));
    if (!memory) {
        team.failed = true;  // the other threads do the work; the caller gets an error
        return;
    }
    void* aligned = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
    for (long long item = team.next++; item < team.items; item = team.next++) team.work(team.context, item, aligned);
    free(memory);
}

// Returns whether the memory could be allocated.
bool spread(void (*work)(const void*, long long, void*), const void* context, long long items, long long bytes,
            int threads, Parallel parallel) {
    Team team;
    team.work = work, team.context = context, team.items = items, team.bytes = bytes;
    team.next = 0, team.failed = false;
    if (threads > items) threads = int(items);
#ifdef __linux__
    if (threads > 1 && parallel)
        parallel(member, &team, unsigned(threads), 0);
    else
        member(&team);
#else
    (void)parallel;
    std::vector<std::thread> helpers;
    for (int i = 1; i < threads; ++i) helpers.emplace_back(member, &team);
    member(&team);
    for (auto& helper : helpers) helper.join();
#endif
    return !team.failed;
}

}  // namespace

#endif
