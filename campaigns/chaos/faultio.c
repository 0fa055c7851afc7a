/* Preloaded into a process: its writes below CHAOS_IO_ROOT fail, or end it, as the file CHAOS_IO_CONTROL says.
 *
 *   control: error   0: all is well; an errno: fail with it; -1: write half of it, then SIGKILL
 *            skip    so many calls are left alone first
 *            times   then so many fail; negative: all, until error is 0 again
 *            hits    how many have failed
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

struct control { int32_t error, skip, times, hits; };
static struct control nothing;
static volatile struct control *control = &nothing;
static const char *root;
static size_t root_length;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("CHAOS_IO_CONTROL");
    root = getenv("CHAOS_IO_ROOT");
    if (!path || !root) return;
    root_length = strlen(root);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED) control = mapped;
}

static int ours(int fd) {
    char link[64], target[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target - 1);
    return length >= (ssize_t)root_length && memcmp(target, root, root_length) == 0;
}

/* The error that this call is to meet, or 0. */
static int meets(int fd) {
    if (!control->error || !ours(fd)) return 0;
    if (__sync_fetch_and_sub(&control->skip, 1) > 0) return 0;
    control->skip = 0;
    int error = control->error;
    if (control->times > 0 && __sync_sub_and_fetch(&control->times, 1) == 0) control->error = 0;
    __sync_fetch_and_add(&control->hits, 1);
    return error;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRITER(name, half, whole, ...)                 \
    {                                                  \
        REAL(name);                                    \
        int error = meets(fd);                         \
        if (error < 0) { half; kill(getpid(), SIGKILL); } \
        if (error > 0) { errno = error; return -1; }   \
        return whole;                                  \
    }

ssize_t write(int fd, const void *data, size_t size)
    WRITER(write, (void)!real(fd, data, size / 2), real(fd, data, size))
ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
    WRITER(pwrite, (void)!real(fd, data, size / 2, at), real(fd, data, size, at))
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
    WRITER(pwrite64, (void)!real(fd, data, size / 2, at), real(fd, data, size, at))
int fsync(int fd) WRITER(fsync, (void)0, real(fd))
int fdatasync(int fd) WRITER(fdatasync, (void)0, real(fd))
int ftruncate(int fd, off_t size) WRITER(ftruncate, (void)0, real(fd, size))
int ftruncate64(int fd, off64_t size) WRITER(ftruncate64, (void)0, real(fd, size))
