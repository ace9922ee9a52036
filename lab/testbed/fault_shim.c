// Library that injects faults into one process by LD_PRELOAD, for the testbed only. It gives the process its own wall
// clock, because CLOCK_REALTIME is not namespaced and a test must not set the machine's clock. It also emulates a disk
// on which no write succeeds. Otherwise a full tmpfs would refuse only those writes that need another page, unlike a
// file system that never overwrites data. The file that COREWARD_FAULTS names contains the faults, and may change at
// any time.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL

// Contents of the faults file, which lab/testbed/src/preloaded_faults.rs writes.
struct faults {
	// Time added to the wall clock (ns).
	_Atomic int64_t clock_offset_ns;
	// If not 0, writes at a position of a regular file fail with ENOSPC, as does making it longer.
	_Atomic int64_t disk_full;
};

static const struct faults *faults;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static ssize_t (*real_pwrite64)(int, const void *, size_t, off64_t);
static int (*real_ftruncate64)(int, off64_t);

static void find_real(void)
{
	*(void **)&real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
	*(void **)&real_pwrite64 = dlsym(RTLD_NEXT, "pwrite64");
	*(void **)&real_ftruncate64 = dlsym(RTLD_NEXT, "ftruncate64");
}

__attribute__((constructor)) static void open_faults(void)
{
	find_real();
	const char *path = getenv("COREWARD_FAULTS");
	int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (file < 0)
		return;
	void *page = mmap(NULL, sizeof(*faults), PROT_READ, MAP_SHARED, file, 0);
	close(file);
	if (page != MAP_FAILED)
		faults = page;
}

static int must_fail_with_enospc(int file)
{
	struct stat status;
	return faults && faults->disk_full && !fstat(file, &status) && S_ISREG(status.st_mode);
}

ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t position)
{
	if (must_fail_with_enospc(file)) {
		errno = ENOSPC;
		return -1;
	}
	return real_pwrite64(file, bytes, count, position);
}

int ftruncate64(int file, off64_t length)
{
	if (must_fail_with_enospc(file)) {
		errno = ENOSPC;
		return -1;
	}
	return real_ftruncate64(file, length);
}

// Programs use either name, because off_t has 64 bits.
int ftruncate(int file, off_t length)
{
	return ftruncate64(file, length);
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t position)
{
	return pwrite64(file, bytes, count, position);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	// Another library's constructor may call this function before ours has run.
	if (!real_clock_gettime)
		find_real();
	int outcome = real_clock_gettime(clock, now);
	if (outcome || !faults || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
		return outcome;
	int64_t moment_ns = now->tv_sec * SECOND_NS + now->tv_nsec + faults->clock_offset_ns;
	if (moment_ns < 0)
		moment_ns = 0;
	now->tv_sec = moment_ns / SECOND_NS;
	now->tv_nsec = moment_ns % SECOND_NS;
	return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	(void)zone;
	struct timespec moment;
	int outcome = clock_gettime(CLOCK_REALTIME, &moment);
	now->tv_sec = moment.tv_sec;
	now->tv_usec = moment.tv_nsec / 1000;
	return outcome;
}

time_t time(time_t *now)
{
	struct timespec moment;
	clock_gettime(CLOCK_REALTIME, &moment);
	if (now)
		*now = moment.tv_sec;
	return moment.tv_sec;
}
