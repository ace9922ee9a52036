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
 * Assignment of cores to services 0 and 1 (RingLeader, NSDI'23, Sect. 4.4): both services run on every core.
 */
#define COREWARD_COMPLETE_SHARE 0

/**
 * Assignment: cores change hands by hints.
 */
#define COREWARD_DEDICATED 1

/**
 * Assignment: cores open to both services and close again by hints.
 */
#define COREWARD_HYBRID 2

/**
 * Core allocation that the workers of a process share.
 */
struct coreward_allocator;

/**
 * A handler's view of its core.
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
 * A request, valid until the handler returns.
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
 * Serves a request: writes at most `capacity` bytes to `response` and returns their number, or a negative number for
 * no response. `user` is that of `coreward_serve`.
 */
typedef ptrdiff_t (*coreward_handler)(const struct coreward_request *request,
                                      uint8_t *response,
                                      size_t capacity,
                                      struct coreward_context *context,
                                      void *user);

/**
 * Options of `coreward_serve`. A field of 0 has its default.
 */
struct coreward_serve_options {
  /**
   * Acts on hints, between requests and at yield points; null: monitors are rearmed, and nothing else.
   */
  const struct coreward_allocator *allocator;
  /**
   * Time that a request runs before it yields (5 us).
   */
  uint64_t quantum_ns;
  /**
   * Time that an idle worker polls before it sleeps (20 us).
   */
  uint64_t spin_ns;
  /**
   * Time that an idle worker sleeps between two polls (50 us).
   */
  uint64_t sleep_ns;
  /**
   * Period of a timer that preempts handlers also between yield points (no timer). Two threads of the core then call
   * the handler, which must not hold a lock that requests of higher priority need.
   */
  uint64_t timer_ns;
  /**
   * Requests without a response in one LoadFeedback, at most (4).
   */
  uint32_t feedback_batch;
};

struct coreward_serve_counters {
  /**
   * Requests that ended.
   */
  uint64_t served;
  /**
   * Requests that were served before another one of lower priority ended.
   */
  uint64_t preempting;
  /**
   * Responses that fit no slot and were not sent.
   */
  uint64_t too_long;
};

/**
 * A load hint (LoadHint).
 */
struct coreward_hint {
  /**
   * Services with requests that no core takes: bit s is service s.
   */
  uint64_t waiting;
  uint8_t service;
  /**
   * 1: the service needs more cores; 0: it can do with fewer.
   */
  uint8_t scale_up;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the text of this thread's last error, valid until the next one; empty without any.
 */
const char *coreward_last_error(void);

/**
 * Creates the allocation of `cores` cores with one of the assignments. `reserved`: cores that each service keeps for
 * itself. Returns null for an unknown assignment.
 */
struct coreward_allocator *coreward_allocator_new(int assignment,
                                                  uint16_t cores,
                                                  uint16_t reserved);

/**
 * Frees an allocation, which may be null, when no worker uses it.
 */
void coreward_allocator_free(struct coreward_allocator *allocator);

/**
 * Serves waiting requests of higher priority if the handler's quantum is used up.
 */
void coreward_yield_point(struct coreward_context *context);

/**
 * Serves requests until `coreward_stop`. Then it disables all services at this core and serves
 * the rest. With an allocator it first enables the services that the core runs now. `options` and `counters` may be
 * null. Fails when the orchestrator ended, or the memory is damaged: free the worker and connect again then.
 */
int coreward_serve(struct coreward_worker *worker,
                   coreward_handler handler,
                   void *user,
                   const struct coreward_serve_options *options,
                   struct coreward_serve_counters *counters);

/**
 * Connects to the orchestrator whose memory is at `path`. Returns null on an error.
 */
struct coreward_runtime *coreward_connect(const char *path);

/**
 * Ends the use of a runtime, which may be null. Its workers keep the registrations until they are freed.
 */
void coreward_runtime_free(struct coreward_runtime *runtime);

/**
 * Ends `coreward_serve` of all workers of the runtime. May be called in a signal handler.
 */
void coreward_stop(const struct coreward_runtime *runtime);

/**
 * Returns the number of cores that can have a worker; 0 for null.
 */
uint16_t coreward_cores(const struct coreward_runtime *runtime);

/**
 * Returns the bytes of the longest request and response; 0 for null.
 */
size_t coreward_payload_bytes(const struct coreward_runtime *runtime);

/**
 * Returns the number of services of the orchestrator; 0 for null.
 */
uint8_t coreward_services(const struct coreward_runtime *runtime);

/**
 * Claims a service for this process (RegisterService). Address (host byte order), port and priority must be those of
 * the orchestrator's configuration.
 */
int coreward_register_service(const struct coreward_runtime *runtime,
                              uint8_t service,
                              uint32_t address,
                              uint16_t port,
                              uint8_t priority);

/**
 * Becomes the worker of a core, which at first runs no service. Returns null on an error.
 */
struct coreward_worker *coreward_worker_new(const struct coreward_runtime *runtime, uint16_t core);

/**
 * Ends a worker, which may be null. Requests in its queues are lost.
 */
void coreward_worker_free(struct coreward_worker *worker);

/**
 * Runs a service on `core` from now on (EnableService).
 */
int coreward_enable_service(struct coreward_worker *worker, uint8_t service, uint16_t core);

/**
 * Stops new requests of a service at `core` (DisableService). Its present requests remain.
 */
int coreward_disable_service(struct coreward_worker *worker, uint8_t service, uint16_t core);

/**
 * Reports `count` requests that `core` completed without a response (LoadFeedback).
 */
int coreward_load_feedback(struct coreward_worker *worker,
                           uint8_t service,
                           uint16_t core,
                           uint32_t count);

/**
 * Enables hints to scale a service up (EnableLoadMonitor): when one request waits at two checks, `epoch_ns` apart.
 */
int coreward_enable_scale_up(struct coreward_worker *worker,
                             uint8_t service,
                             uint64_t epoch_ns);

/**
 * Enables hints to scale a service down (EnableLoadMonitor): when at most `threshold` requests wait during
 * `calm_epochs` epochs of `epoch_ns`.
 */
int coreward_enable_scale_down(struct coreward_worker *worker,
                               uint8_t service,
                               uint64_t epoch_ns,
                               uint64_t threshold,
                               uint32_t calm_epochs);

/**
 * Rearms a service's load monitor after the cores acted on its last hint (RearmLoadMonitor).
 */
int coreward_rearm_load_monitor(struct coreward_worker *worker, uint8_t service);

/**
 * Reads the next hint for this core (LoadHint). Returns 1 with a hint, 0 without one.
 */
int coreward_next_hint(struct coreward_worker *worker, struct coreward_hint *hint);

/**
 * Takes the oldest request of the highest priority, for servers with a scheduler of their own. It is completed by
 * `coreward_respond` or `coreward_load_feedback`, and freed by `coreward_taken_free`. Returns null without a request
 * (`error` is 0) and on an error (`error` is -1). `service`, `payload` and `length` are set with a request.
 */
struct coreward_taken_request *coreward_take_request(struct coreward_worker *worker,
                                                     uint8_t *service,
                                                     const uint8_t **payload,
                                                     size_t *length,
                                                     int *error);

/**
 * Sends the response to a request of `coreward_take_request`, which completes it.
 */
int coreward_respond(struct coreward_worker *worker,
                     const struct coreward_taken_request *request,
                     const uint8_t *response,
                     size_t length);

/**
 * Frees a request of `coreward_take_request`, which may be null.
 */
void coreward_taken_free(struct coreward_taken_request *request);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* COREWARD_RUNTIME_H */
