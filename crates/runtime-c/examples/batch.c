/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Two services that share their cores. Service 0 answers requests immediately. Service 1 has a lower priority and is a
 * batch that always has work. The batch's units are requests, too, so that cores take the next one by themselves and
 * can preempt it. A thread keeps two units per core outstanding. Each unit counts the primes in a range of numbers, and
 * the results are printed at the end. With TIMER_US, a timer of this period preempts units, which then do not yield.
 */
#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "coreward_runtime.h"

enum { INTERACTIVE, BATCH, SERVICES };
enum { CORES = 256, UNITS_PER_CORE = 2, NUMBERS_PER_UNIT = 20000 };

static struct coreward_runtime *runtime;
static struct sockaddr_in batch_address = {.sin_family = AF_INET};
static atomic_bool is_ended;
static struct coreward_serve_options options;
static atomic_ullong requests, units, primes;

static void stop(int signal)
{
	(void)signal;
	is_ended = true;
}

static bool is_prime(uint32_t number)
{
	for (uint32_t divisor = 2; divisor <= number / divisor; divisor++)
		if (number % divisor == 0)
			return false;
	return number > 1;
}

/* A unit's payload is the number of its range, and the response is the number of primes in it. */
static ptrdiff_t run_unit(const struct coreward_request *request, uint8_t *response, size_t capacity,
			  struct coreward_context *context)
{
	uint32_t unit, found = 0;

	if (request->length != sizeof(unit) || capacity < sizeof(found))
		return -1;
	memcpy(&unit, request->payload, sizeof(unit));
	for (uint32_t number = 0; number < NUMBERS_PER_UNIT; number++) {
		found += is_prime(unit * NUMBERS_PER_UNIT + number);
		if (!options.timer_ns)
			coreward_yield_point(context);
	}
	memcpy(response, &found, sizeof(found));
	return sizeof(found);
}

static ptrdiff_t handle(const struct coreward_request *request, uint8_t *response, size_t capacity,
			struct coreward_context *context, void *user)
{
	size_t length = request->length < capacity ? request->length : capacity;

	(void)user;
	if (request->service == BATCH)
		return run_unit(request, response, capacity, context);
	memcpy(response, request->payload, length);
	requests++;
	return length;
}

static void *serve(void *core)
{
	struct coreward_worker *worker = coreward_worker_new(runtime, (uint16_t)(uintptr_t)core);
	struct coreward_serve_counters counters = {0};
	bool has_failed = !worker;

	for (uint8_t service = 0; !has_failed && service < SERVICES; service++)
		has_failed = coreward_enable_service(worker, service, (uint16_t)(uintptr_t)core);
	has_failed = has_failed || coreward_serve(worker, handle, NULL, &options, &counters);
	if (has_failed)
		fprintf(stderr, "core %lu: %s\n", (unsigned long)(uintptr_t)core, coreward_last_error());
	coreward_worker_free(worker);
	return (void *)(uintptr_t)counters.preempting;
}

/* Keeps as many units outstanding as the window allows. If a request or response is lost, sends another unit. */
static void feed(int client)
{
	unsigned int window = UNITS_PER_CORE * coreward_cores(runtime), under_way = 0;
	uint32_t next = 0, found;

	while (!is_ended) {
		for (; under_way < window; under_way++, next++)
			sendto(client, &next, sizeof(next), 0, (struct sockaddr *)&batch_address,
			       sizeof(batch_address));
		if (recv(client, &found, sizeof(found), 0) == sizeof(found)) {
			under_way--;
			units++;
			primes += found;
		} else {
			under_way = 0;
		}
	}
}

/* Connects and registers both services. Returns false on an error. */
static bool connect_to(char **arguments)
{
	int ports[SERVICES] = {atoi(arguments[2]), atoi(arguments[3])};

	batch_address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	batch_address.sin_port = htons(ports[BATCH]);
	runtime = coreward_connect(arguments[1]);
	if (runtime && !coreward_register_service(runtime, INTERACTIVE, INADDR_LOOPBACK, ports[INTERACTIVE], 0) &&
	    !coreward_register_service(runtime, BATCH, INADDR_LOOPBACK, ports[BATCH], 1))
		return true;
	fprintf(stderr, "%s\n", coreward_last_error());
	return false;
}

int main(int count, char **arguments)
{
	int client = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct timeval timeout = {.tv_usec = 200000};
	unsigned long long preempting = 0;
	pthread_t threads[CORES];
	void *result;

	if (count != 4 && count != 5) {
		fprintf(stderr, "usage: batch MEMORY PORT BATCH_PORT [TIMER_US]\n");
		return 1;
	}
	options.timer_ns = count == 5 ? atoll(arguments[4]) * 1000 : 0;
	if (client < 0 || setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)) ||
	    !connect_to(arguments))
		return 1;
	signal(SIGTERM, stop);
	for (uint16_t core = 0; core < coreward_cores(runtime); core++)
		pthread_create(&threads[core], NULL, serve, (void *)(uintptr_t)core);
	feed(client);
	coreward_stop(runtime);
	for (uint16_t core = 0; core < coreward_cores(runtime); core++)
		preempting += pthread_join(threads[core], &result) ? 0 : (uintptr_t)result;
	printf("%llu requests, %llu inside units; %llu units, %llu primes\n", requests, preempting, units, primes);
	coreward_runtime_free(runtime);
	close(client);
	return 0;
}
