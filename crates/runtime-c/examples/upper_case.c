/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A server in C that answers a request with its text in upper case. A request that begins with '*' takes long. */
#include <ctype.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "coreward_runtime.h"

static struct coreward_runtime *runtime;

static void stop(int signal)
{
	(void)signal;
	coreward_stop(runtime);
}

static ptrdiff_t answer(const struct coreward_request *request, uint8_t *response, size_t capacity,
			struct coreward_context *context, void *user)
{
	(void)user;
	if (request->length > 0 && request->payload[0] == '*')
		for (int i = 0; i < 1000000; i++)
			coreward_yield_point(context);
	for (size_t i = 0; i < request->length && i < capacity; i++)
		response[i] = toupper(request->payload[i]);
	return request->length;
}

static void *serve(void *core)
{
	struct coreward_worker *worker = coreward_worker_new(runtime, (uint16_t)(uintptr_t)core);
	struct coreward_serve_counters counters = { 0 };
	int failed = !worker;

	for (uint8_t service = 0; !failed && service < coreward_services(runtime); service++)
		failed = coreward_enable_service(worker, service, (uint16_t)(uintptr_t)core);
	failed = failed || coreward_serve(worker, answer, NULL, NULL, &counters);
	if (failed)
		fprintf(stderr, "core %lu: %s\n", (unsigned long)(uintptr_t)core, coreward_last_error());
	printf("core %lu: %llu requests\n", (unsigned long)(uintptr_t)core, (unsigned long long)counters.served);
	coreward_worker_free(worker);
	return (void *)(uintptr_t)failed;
}

int main(int count, char **arguments)
{
	pthread_t threads[256];
	void *failed = NULL, *result;

	if (count != 3 || !(runtime = coreward_connect(arguments[1])) ||
	    coreward_register_service(runtime, 0, 0x7f000001, atoi(arguments[2]), 0)) {
		fprintf(stderr, "%s\n", count == 3 ? coreward_last_error() : "usage: upper_case MEMORY PORT");
		return 1;
	}
	signal(SIGTERM, stop);
	for (uint16_t core = 0; core < coreward_cores(runtime); core++)
		pthread_create(&threads[core], NULL, serve, (void *)(uintptr_t)core);
	for (uint16_t core = 0; core < coreward_cores(runtime); core++)
		failed = pthread_join(threads[core], &result) || result ? result : failed;
	coreward_runtime_free(runtime);
	return failed != NULL;
}
