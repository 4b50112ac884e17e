// Preloaded library: a wall clock of its own for each process, which clock.py sets.
// The monotonic clock stays right, as it does when an administrator or NTP sets the real one, or when
// the machine was suspended, which the clock since the boot counts.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

// The content of the process's file: seconds after the true time, how often the process has read a
// time that was not true, and seconds in which the machine was suspended.
struct clock { volatile long offset; unsigned long reads; volatile long suspended; };
static struct clock *own;
static char folder[3800];

static struct clock *file_of(const char *name, int flags) {
    char path[4000];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDWR | O_CLOEXEC | flags, 0600);
    if (file < 0) return 0;
    void *mapped = MAP_FAILED;
    if (ftruncate(file, sizeof *own) == 0)
        mapped = mmap(0, sizeof *own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? 0 : mapped;
}

static struct clock *file_of_process(pid_t process) {
    char name[32];
    snprintf(name, sizeof name, "%d", process);
    return file_of(name, 0);
}

// The file appears with its content, so that no clock that is set meanwhile is overwritten.
static void start_with(long offset, long suspended) {
    char name[32], before[4000], after[4000];
    snprintf(name, sizeof name, "%d.new", getpid());
    struct clock *mine = file_of(name, O_CREAT);
    if (!mine) return;
    mine->offset = offset;
    mine->reads = 0;
    mine->suspended = suspended;
    snprintf(before, sizeof before, "%s/%s", folder, name);
    snprintf(after, sizeof after, "%s/%d", folder, getpid());
    if (rename(before, after) == 0) own = mine;
    else munmap(mine, sizeof *mine);
}

// A process starts with the clock of its parent, as on a machine.
static void in_child(void) {
    struct clock *parents = own;
    if (!parents) return;
    start_with(parents->offset, parents->suspended);
    munmap(parents, sizeof *parents);
}

__attribute__((constructor)) static void start(void) {
    const char *from = getenv("STEPPING_CLOCKS");
    if (!from) return;
    snprintf(folder, sizeof folder, "%s", from);
    struct clock *parents = file_of_process(getppid());
    if (!parents) parents = file_of("default", 0);
    start_with(parents ? parents->offset : 0, parents ? parents->suspended : 0);
    if (parents) munmap(parents, sizeof *parents);
    pthread_atfork(0, 0, in_child);
}

static long step(void) {
    if (!own || own->offset == 0) return 0;
    __atomic_fetch_add(&own->reads, 1, __ATOMIC_RELAXED);
    return own->offset;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    int result = original(clock, time);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        time->tv_sec += step();
    if (result == 0 && clock == CLOCK_BOOTTIME && own)
        time->tv_sec += own->suspended;
    return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    static int (*original)(struct timeval *restrict, void *restrict);
    if (!original) original = dlsym(RTLD_NEXT, "gettimeofday");
    int result = original(time, zone);
    if (result == 0 && time) time->tv_sec += step();
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

// The kernel does not know the clock, so deadlines of Abseil, which Ray uses, are translated.
long syscall(long number, ...) {
    static long (*original)(long, ...);
    if (!original) original = dlsym(RTLD_NEXT, "syscall");
    va_list list;
    long a[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    struct timespec deadline;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3] && own && own->offset) {
        deadline = *(struct timespec *)a[3];
        deadline.tv_sec -= own->offset;
        if (deadline.tv_sec < 0) deadline.tv_sec = 0;
        a[3] = (long)&deadline;
    }
    return original(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
