// What the compiler's headers and libstdc++ take that an older glibc has not in its shared libraries, for
// wheels (tools/wheel.py).

#include <pthread.h>
#include <time.h>

extern "C" {

extern void* __dso_handle;
int __cxa_atexit(void (*function)(void*), void* argument, void* library);

// It is in no shared library, but in what links statically beside one.
__attribute__((visibility("hidden"))) int atexit(void (*function)()) {
  return __cxa_atexit(reinterpret_cast<void (*)(void*)>(function), nullptr, &__dso_handle);
}

// False is always right: libstdc++ then counts references with atomic operations.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// On the clock that conditions use by default. A clock that is set meanwhile moves the end of that wait.
__attribute__((visibility("hidden"))) int pthread_cond_clockwait(
    pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  constexpr long kSecond = 1000000000;
  timespec now, real;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  const long nanoseconds = real.tv_nsec + until->tv_nsec - now.tv_nsec + kSecond;  // 0 to 3 seconds
  real.tv_sec += until->tv_sec - now.tv_sec + nanoseconds / kSecond - 1;
  real.tv_nsec = nanoseconds % kSecond;
  return pthread_cond_timedwait(condition, mutex, &real);
}

}  // extern "C"
