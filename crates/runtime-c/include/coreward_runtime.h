/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * C interface of coreward-runtime, written by cbindgen (crates/runtime-c).
 *
 * Functions return 0, or -1 and store a text for coreward_last_error(), if their comments name nothing else. Objects
 * are those of the functions that create them, until they are freed; a null pointer is rejected, and freed without
 * effect. Results may be written where a pointer names a place. An object belongs to one thread at a time, except a
 * runtime and an allocator, which threads share.
 */

#ifndef COREWARD_RUNTIME_H
#define COREWARD_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

/**
 * Assignment of cores to services 0 and 1 (RingLeader, NSDI'23, Sect. 4.4) by which both services run on every core.
 */
#define COREWARD_COMPLETE_SHARE 0

/**
 * Assignment by which each core runs one service, and hints move cores between the services.
 */
#define COREWARD_DEDICATED 1

/**
 * Assignment by which both services share some cores, and hints change the number of service 0's own cores.
 */
#define COREWARD_HYBRID 2

/**
 * Assignment of cores to services, which the workers of a process share.
 */
struct coreward_allocator;

/**
 * The core on which a handler runs, as passed to the handler.
 */
struct coreward_context;

/**
 * A request that was taken out of its core's queues.
 */
struct coreward_taken_request;

/**
 * A process that serves requests. It holds the registrations of its services.
 */
struct coreward_runtime;

struct coreward_worker;

/**
 * A request of a client, valid until the handler returns.
 */
struct coreward_request {
  const uint8_t *payload;
  size_t length;
  /**
   * IPv4 address of the client, in host byte order.
   */
  uint32_t client_address;
  uint16_t client_port;
  uint8_t service;
};

/**
 * Serves a request. Writes at most `capacity` bytes to `response` and returns their number, or returns a negative
 * number to send no response. `user` is the pointer that was passed to `coreward_serve`.
 */
typedef ptrdiff_t (*coreward_handler)(const struct coreward_request *request,
                                      uint8_t *response,
                                      size_t capacity,
                                      struct coreward_context *context,
                                      void *user);

/**
 * Options of `coreward_serve`. A field of 0 has its default, which is given in parentheses.
 */
struct coreward_serve_options {
  /**
   * Allocator that acts on hints, between requests and at yield points. If it is null, a hint only rearms its load
   * monitor.
   */
  const struct coreward_allocator *allocator;
  /**
   * Time for which a request runs before it yields (5 us).
   */
  uint64_t quantum_ns;
  /**
   * Time for which an idle worker polls before it sleeps (20 us).
   */
  uint64_t spin_ns;
  /**
   * Time for which an idle worker sleeps between two polls (50 us).
   */
  uint64_t sleep_ns;
  /**
   * Period of a timer that also preempts handlers between yield points (no timer). Two threads of the core then call
   * the handler, which must not hold a lock that requests of higher priority need.
   */
  uint64_t timer_ns;
  /**
   * Maximum number of requests without a response that one LoadFeedback message reports as completed (4).
   */
  uint32_t feedback_batch;
};

struct coreward_serve_counters {
  /**
   * Requests that were completed.
   */
  uint64_t served;
  /**
   * Requests that were served while a request of lower priority was preempted.
   */
  uint64_t preempting;
  /**
   * Responses that were not sent because they were too long for a slot.
   */
  uint64_t too_long;
};

/**
 * A hint to change the number of a service's cores (LoadHint).
 */
struct coreward_hint {
  /**
   * Bit mask of the services with requests that no core can take, in which bit s is service s.
   */
  uint64_t waiting;
  uint8_t service;
  /**
   * 1 if the service needs more cores, or 0 if fewer suffice.
   */
  uint8_t scale_up;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the text of this thread's last error, valid until its next error, or an empty text if there was none.
 */
const char *coreward_last_error(void);

/**
 * Creates an allocator for `cores` cores by the method `assignment`, such as COREWARD_HYBRID. Each service keeps
 * `reserved` cores for itself. Returns null if the method is unknown.
 */
struct coreward_allocator *coreward_allocator_new(int assignment,
                                                  uint16_t cores,
                                                  uint16_t reserved);

/**
 * Frees an allocator, unless it is null. No worker may use it afterwards.
 */
void coreward_allocator_free(struct coreward_allocator *allocator);

/**
 * Serves waiting requests of higher priority, if the handler has used up its quantum.
 */
void coreward_yield_point(struct coreward_context *context);

/**
 * Serves requests until `coreward_stop` is called. Then it disables all services at this core and serves the remaining
 * requests. With an allocator, it first enables the services that are assigned to the core. `options` and `counters`
 * may be null. Fails when the orchestrator has ended or the memory is damaged. In this case, free the worker and
 * connect again.
 */
int coreward_serve(struct coreward_worker *worker,
                   coreward_handler handler,
                   void *user,
                   const struct coreward_serve_options *options,
                   struct coreward_serve_counters *counters);

/**
 * Connects to the orchestrator whose shared memory is the file `path`. Returns null on an error.
 */
struct coreward_runtime *coreward_connect(const char *path);

/**
 * Frees a runtime, unless it is null. Its workers keep the registrations until they are freed.
 */
void coreward_runtime_free(struct coreward_runtime *runtime);

/**
 * Makes `coreward_serve` return in all workers of the runtime. May be called in a signal handler.
 */
void coreward_stop(const struct coreward_runtime *runtime);

/**
 * Returns the number of cores that can have a worker, or 0 if `runtime` is null.
 */
uint16_t coreward_cores(const struct coreward_runtime *runtime);

/**
 * Returns the maximum length of requests and responses in bytes, or 0 if `runtime` is null.
 */
size_t coreward_payload_bytes(const struct coreward_runtime *runtime);

/**
 * Returns how many services the orchestrator has, or 0 if `runtime` is null.
 */
uint8_t coreward_services(const struct coreward_runtime *runtime);

/**
 * Registers this process as the one that serves a service (RegisterService). Address (in host byte order), port and
 * priority must be those of the orchestrator's configuration.
 */
int coreward_register_service(const struct coreward_runtime *runtime,
                              uint8_t service,
                              uint32_t address,
                              uint16_t port,
                              uint8_t priority);

/**
 * Attaches a worker to a core, on which no service is enabled at first. Returns null on an error.
 */
struct coreward_worker *coreward_worker_new(const struct coreward_runtime *runtime, uint16_t core);

/**
 * Ends a worker, unless it is null. Requests in its queues are lost.
 */
void coreward_worker_free(struct coreward_worker *worker);

/**
 * Enables a service on `core`, so that the core gets its requests (EnableService).
 */
int coreward_enable_service(struct coreward_worker *worker, uint8_t service, uint16_t core);

/**
 * Disables a service on `core`, so that no new requests are sent there (DisableService). Requests in its queues
 * remain.
 */
int coreward_disable_service(struct coreward_worker *worker,
                             uint8_t service,
                             uint16_t core);

/**
 * Reports `count` requests that `core` completed without a response (LoadFeedback).
 */
int coreward_load_feedback(struct coreward_worker *worker,
                           uint8_t service,
                           uint16_t core,
                           uint32_t count);

/**
 * Enables hints to scale a service up (EnableLoadMonitor). A hint is sent if a request waits at two consecutive
 * checks, which are `epoch_ns` apart.
 */
int coreward_enable_scale_up(struct coreward_worker *worker,
                             uint8_t service,
                             uint64_t epoch_ns);

/**
 * Enables hints to scale a service down (EnableLoadMonitor). A hint is sent if at most `threshold` requests wait
 * during `calm_epochs` epochs of `epoch_ns`.
 */
int coreward_enable_scale_down(struct coreward_worker *worker,
                               uint8_t service,
                               uint64_t epoch_ns,
                               uint64_t threshold,
                               uint32_t calm_epochs);

/**
 * Rearms a service's load monitor after the cores have acted on its last hint (RearmLoadMonitor).
 */
int coreward_rearm_load_monitor(struct coreward_worker *worker, uint8_t service);

/**
 * Reads the next hint for this core (LoadHint). Returns 1 if there was a hint, and 0 otherwise.
 */
int coreward_next_hint(struct coreward_worker *worker, struct coreward_hint *hint);

/**
 * Takes the oldest request of the highest priority, for servers with their own scheduler. `coreward_respond` or
 * `coreward_load_feedback` must complete it, and `coreward_taken_free` must free it. Returns null if no request waits
 * (`error` is 0) or on an error (`error` is -1). `service`, `payload` and `length` are only set with a request.
 */
struct coreward_taken_request *coreward_take_request(struct coreward_worker *worker,
                                                     uint8_t *service,
                                                     const uint8_t **payload,
                                                     size_t *length,
                                                     int *error);

/**
 * Sends the response to a request from `coreward_take_request`, which completes the request.
 */
int coreward_respond(struct coreward_worker *worker,
                     const struct coreward_taken_request *request,
                     const uint8_t *response,
                     size_t length);

/**
 * Frees a request from `coreward_take_request`, unless it is null.
 */
void coreward_taken_free(struct coreward_taken_request *request);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* COREWARD_RUNTIME_H */
