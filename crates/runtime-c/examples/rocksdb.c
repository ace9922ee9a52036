/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A key-value server that stores its data in RocksDB. Service 0 serves GET. Service 1 at the same port serves PUT and
 * SCAN with a lower priority. The server answers the requests of `coreward-lab load` (lab/load/src/key_value.rs), in
 * which all numbers are little-endian:
 *
 *   request   0 type | 1 key length | 2 value length (16) | 4 id (32)     | 8 service time (32) | 12 key | value
 *   response  0 type | 1 status     | 2 core (16)         | 4 id (32)     | 8 part | 9 parts | 10 pairs (16) | 12 pairs
 *   pair      0 key length | 1 zero | 2 value length (16) | 4 key | value
 *
 * Type 1 is GET, 2 is PUT, and 128 + n is a SCAN of n pairs that starts at the key. A response is one datagram with the
 * pairs that fit. If a GET arrives during a SCAN, it is served between two pairs when the SCAN's quantum is used up.
 */
#include <arpa/inet.h>
#include <pthread.h>
#include <rocksdb/c.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coreward_runtime.h"

enum { GET = 1, PUT = 2, SCAN = 128 };
enum { DONE = 0, NOT_FOUND = 1, FAILED = 2 };
enum { SERVICES = 2, REQUEST_HEADER = 12, RESPONSE_HEADER = 12, PAIR_HEADER = 4, CORES = 256 };

static struct coreward_runtime *runtime;
static rocksdb_t *database;
static rocksdb_readoptions_t *read_options;
static rocksdb_writeoptions_t *write_options;

/* A request whose lengths have been checked. */
struct query {
	uint8_t type;
	const char *key;
	size_t key_length;
	const char *value;
	size_t value_length;
};

/* A response to which pairs are still added. */
struct answer {
	uint8_t *bytes;
	size_t length;
	size_t capacity;
	uint16_t pair_count;
};

static void stop(int signal)
{
	(void)signal;
	coreward_stop(runtime);
}

static void put_16(uint8_t *to, size_t number)
{
	to[0] = number & 0xff;
	to[1] = number >> 8;
}

/* Appends a pair to the response. Returns false when it does not fit. */
static bool append(struct answer *answer, const char *key, size_t key_length, const char *value, size_t value_length)
{
	uint8_t *pair = answer->bytes + answer->length;
	size_t length = PAIR_HEADER + key_length + value_length;

	if (key_length > UINT8_MAX || value_length > UINT16_MAX || answer->length + length > answer->capacity)
		return false;
	pair[0] = key_length;
	pair[1] = 0;
	put_16(pair + 2, value_length);
	memcpy(pair + PAIR_HEADER, key, key_length);
	memcpy(pair + PAIR_HEADER + key_length, value, value_length);
	answer->length += length;
	answer->pair_count++;
	return true;
}

/* Prints and frees RocksDB's error text, if there is one. Returns whether there was an error. */
static bool failed(char *error)
{
	if (error)
		fprintf(stderr, "rocksdb: %s\n", error);
	free(error);
	return error;
}

static int get(const struct query *query, struct answer *answer)
{
	char *error = NULL, *value;
	size_t length;
	bool fits;

	value = rocksdb_get(database, read_options, query->key, query->key_length, &length, &error);
	if (failed(error))
		return FAILED;
	if (!value)
		return NOT_FOUND;
	fits = append(answer, query->key, query->key_length, value, length);
	free(value);
	return fits ? DONE : FAILED;
}

static int put(const struct query *query)
{
	char *error = NULL;

	rocksdb_put(database, write_options, query->key, query->key_length, query->value, query->value_length, &error);
	return failed(error) ? FAILED : DONE;
}

static int scan(const struct query *query, struct answer *answer, struct coreward_context *context)
{
	rocksdb_iterator_t *iterator = rocksdb_create_iterator(database, read_options);
	char *error = NULL;

	rocksdb_iter_seek(iterator, query->key, query->key_length);
	for (int left = query->type - SCAN; left > 0 && rocksdb_iter_valid(iterator); left--) {
		size_t key_length, value_length;
		const char *key = rocksdb_iter_key(iterator, &key_length);
		const char *value = rocksdb_iter_value(iterator, &value_length);

		if (!append(answer, key, key_length, value, value_length))
			break;
		coreward_yield_point(context);
		rocksdb_iter_next(iterator);
	}
	rocksdb_iter_get_error(iterator, &error);
	rocksdb_iter_destroy(iterator);
	return failed(error) ? FAILED : DONE;
}

/* Parses and checks a request. Returns false if the datagram is no valid request. */
static bool read_query(const struct coreward_request *request, struct query *query)
{
	const uint8_t *bytes = request->payload;

	if (request->length < REQUEST_HEADER)
		return false;
	query->type = bytes[0];
	query->key_length = bytes[1];
	query->value_length = bytes[2] | bytes[3] << 8;
	query->key = (const char *)bytes + REQUEST_HEADER;
	query->value = query->key + query->key_length;
	if (request->length != REQUEST_HEADER + query->key_length + query->value_length)
		return false;
	return query->type > SCAN || ((query->type == GET || query->type == PUT) && query->key_length > 0);
}

static ptrdiff_t handle(const struct coreward_request *request, uint8_t *response, size_t capacity,
			struct coreward_context *context, void *core)
{
	struct answer answer = {.bytes = response, .length = RESPONSE_HEADER, .capacity = capacity};
	struct query query;
	int status;

	if (capacity < RESPONSE_HEADER || !read_query(request, &query))
		return -1;
	if (query.type == GET)
		status = get(&query, &answer);
	else
		status = query.type == PUT ? put(&query) : scan(&query, &answer, context);
	response[0] = query.type;
	response[1] = status;
	put_16(response + 2, (uintptr_t)core);
	memcpy(response + 4, request->payload + 4, 4);
	response[8] = 0;
	response[9] = 1;
	put_16(response + 10, answer.pair_count);
	return answer.length;
}

static void *serve(void *core)
{
	struct coreward_worker *worker = coreward_worker_new(runtime, (uint16_t)(uintptr_t)core);
	struct coreward_serve_counters counters = {0};
	bool has_failed = !worker;

	for (uint8_t service = 0; !has_failed && service < SERVICES; service++)
		has_failed = coreward_enable_service(worker, service, (uint16_t)(uintptr_t)core);
	has_failed = has_failed || coreward_serve(worker, handle, core, NULL, &counters);
	if (has_failed)
		fprintf(stderr, "core %lu: %s\n", (unsigned long)(uintptr_t)core, coreward_last_error());
	printf("core %lu: %llu requests, %llu inside others\n", (unsigned long)(uintptr_t)core,
	       (unsigned long long)counters.served, (unsigned long long)counters.preempting);
	coreward_worker_free(worker);
	return (void *)(uintptr_t)has_failed;
}

/* Connects and registers both services. Returns false on an error. */
static bool connect_to(const char *memory, const char *address, const char *port)
{
	struct in_addr parsed;

	if (inet_pton(AF_INET, address, &parsed) != 1) {
		fprintf(stderr, "%s: expected an IPv4 address\n", address);
		return false;
	}
	runtime = coreward_connect(memory);
	for (uint8_t service = 0; runtime && service < SERVICES; service++)
		if (coreward_register_service(runtime, service, ntohl(parsed.s_addr), atoi(port), service))
			break;
		else if (service == SERVICES - 1)
			return true;
	fprintf(stderr, "%s\n", coreward_last_error());
	return false;
}

/* Opens the database in a directory, which is created if it does not exist. Returns false on an error. */
static bool open_database(const char *directory)
{
	rocksdb_options_t *options = rocksdb_options_create();
	char *error = NULL;

	rocksdb_options_set_create_if_missing(options, 1);
	read_options = rocksdb_readoptions_create();
	write_options = rocksdb_writeoptions_create();
	database = rocksdb_open(options, directory, &error);
	rocksdb_options_destroy(options);
	return !failed(error);
}

int main(int count, char **arguments)
{
	pthread_t threads[CORES];
	void *has_failed = NULL, *result;

	if (count != 5) {
		fprintf(stderr, "usage: rocksdb MEMORY ADDRESS PORT DIRECTORY\n");
		return 1;
	}
	if (!open_database(arguments[4]) || !connect_to(arguments[1], arguments[2], arguments[3]))
		return 1;
	signal(SIGTERM, stop);
	for (uint16_t core = 0; core < coreward_cores(runtime); core++)
		pthread_create(&threads[core], NULL, serve, (void *)(uintptr_t)core);
	for (uint16_t core = 0; core < coreward_cores(runtime); core++)
		has_failed = pthread_join(threads[core], &result) || result ? result : has_failed;
	coreward_runtime_free(runtime);
	rocksdb_close(database);
	return has_failed != NULL;
}
