/* SPDX-License-Identifier: Apache-2.0 */
/* http.c - connections (libmicrohttpd, a thread for each): who may ask, how long a body may be, answers and streams. */
#include "http.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* libmicrohttpd stops to accept at its limit: ours is lower, so that a new connection can push an old one out. */
enum { LEAVING_CONNECTIONS = 32 };

/* Seconds in which a client must say something while it sends its request. */
enum { IDLE_SECONDS = 30 };
/* Connections beyond those that can be answered or wait: what asks for documents, metrics, or sits idle. */
enum { SPARE_CONNECTIONS = 64 };
/* Bodies of the largest size that may be in memory at the same time. */
enum { BODIES = 8 };

struct serve_http {
    serve_server *server;
    struct MHD_Daemon *daemon;
    int socket;
    serve_connections connections;
};

/* ---------------------------------------------------------------------------------------------------------- answers */

static enum MHD_Result put_answer(serve_exchange *x, unsigned status, struct MHD_Response *response, const char *type)
{
    if (response == NULL)
        return MHD_NO;
    MHD_add_response_header(response, "Content-Type", type);
    MHD_add_response_header(response, "Cache-Control", "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "X-Frame-Options", "DENY");
    if (status == 401)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (status == 429 || status == 503)
        MHD_add_response_header(response, "Retry-After", "1");
    if (status == 413 || atomic_load(&x->server->ending))
        MHD_add_response_header(response, "Connection", "close");
    atomic_fetch_add(&x->server->answers[status / 100 < 6 ? status / 100 : 5], 1);
    const enum MHD_Result result = MHD_queue_response(x->connection, status, response);
    MHD_destroy_response(response);
    return result;
}

enum MHD_Result serve_send_text(serve_exchange *x, const char *type, const void *text, size_t bytes,
                                enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(bytes, (void *)(uintptr_t)text, mode);
    if (response == NULL && mode == MHD_RESPMEM_MUST_FREE)
        free((void *)(uintptr_t)text);
    return put_answer(x, 200, response, type);
}

enum MHD_Result serve_send_json(serve_exchange *x, unsigned status, cJSON *root)
{
    static const char no_memory[] =
        "{\"error\":{\"message\":\"no memory for the answer\",\"type\":\"server_error\",\"param\":null,"
        "\"code\":\"no_memory\"}}";
    char *text = root != NULL ? cJSON_PrintUnformatted(root) : NULL;
    cJSON_Delete(root);
    if (text == NULL)
        return put_answer(
            x, 503,
            MHD_create_response_from_buffer(sizeof no_memory - 1, (void *)(uintptr_t)no_memory, MHD_RESPMEM_PERSISTENT),
            "application/json");
    struct MHD_Response *response = MHD_create_response_from_buffer(strlen(text), text, MHD_RESPMEM_MUST_FREE);
    if (response == NULL)
        free(text);
    return put_answer(x, status, response, "application/json");
}

enum MHD_Result serve_send_error(serve_exchange *x, const serve_error *error)
{
    return serve_send_json(x, error->status, serve_error_json(error));
}

/* ----------------------------------------------------------------------------------------------- waiting, streaming */

static serve_connection *connection_of(struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info != NULL ? info->socket_context : NULL;
}

/* A client that closed its end wants nothing any more: it has nothing else to say before the answer is there. */
static bool is_gone(serve_exchange *x)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(x->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    char byte;
    if (info == NULL)
        return true;
    const ssize_t n = recv(info->connect_fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n == 0) /* or it is us who read no more: this is the last answer then */
        return !serve_connections_closing(&x->http->connections, connection_of(x->connection));
    return n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
}

/* With the job's lock: a while, or until something changed. */
static void wait_a_bit(serve_job *job)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 200000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_cond_timedwait(&job->changed, &job->lock, &until);
}

bool serve_wait(serve_exchange *x, serve_job *job, bool first)
{
    bool gone = false;
    pthread_mutex_lock(&job->lock);
    while (!job->done && !(first && job->out.bytes > job->taken) && !gone) {
        wait_a_bit(job);
        if (job->done)
            break;
        pthread_mutex_unlock(&job->lock);
        gone = is_gone(x);
        pthread_mutex_lock(&job->lock);
    }
    pthread_mutex_unlock(&job->lock);
    if (gone)
        atomic_store(&job->cancelled, true);
    return !gone;
}

/* libmicrohttpd asks for the next bytes of a stream. */
static ssize_t read_stream(void *opaque, uint64_t position, char *buffer, size_t room)
{
    serve_exchange *x = opaque;
    serve_job *job = x->job;
    (void)position;
    if (!serve_wait(x, job, true))
        return MHD_CONTENT_READER_END_WITH_ERROR;
    pthread_mutex_lock(&job->lock);
    size_t n = job->out.bytes - job->taken;
    n = n < room ? n : room;
    if (n > 0)
        memcpy(buffer, job->out.data + job->taken, n);
    job->taken += n;
    if (job->taken == job->out.bytes)
        job->taken = job->out.bytes = 0;
    pthread_mutex_unlock(&job->lock);
    return n > 0 ? (ssize_t)n : MHD_CONTENT_READER_END_OF_STREAM;
}

enum MHD_Result serve_send_stream(serve_exchange *x, serve_job *job)
{
    x->job = job; /* on_completed lets it go */
    struct MHD_Response *response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, read_stream, x, NULL);
    if (response != NULL)
        MHD_add_response_header(response, "X-Accel-Buffering", "no");
    return put_answer(x, 200, response, "text/event-stream; charset=utf-8");
}

/* ------------------------------------------------------------------------------------------------------ who may ask */

/* Takes the same time wherever two keys differ. */
static bool same_key(const char *a, const char *b)
{
    const size_t na = strlen(a), nb = strlen(b);
    volatile unsigned difference = na != nb;
    for (size_t i = 0; i < na; i++)
        difference |= (unsigned char)a[i] ^ (unsigned char)b[nb > 0 ? i % nb : 0];
    return difference == 0;
}

static void name_owner(const char *key, char owner[SERVE_OWNER_BYTES])
{
    const XXH128_hash_t hash = XXH3_128bits(key, strlen(key));
    snprintf(owner, SERVE_OWNER_BYTES, "%016llx%016llx", (unsigned long long)hash.high64,
             (unsigned long long)hash.low64);
}

static bool check_key(serve_exchange *x)
{
    const serve_options *o = x->server->options;
    if (o->num_keys == 0) {
        name_owner("", x->owner);
        return true;
    }
    const char *given = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Authorization");
    if (given != NULL && strncasecmp(given, "Bearer ", 7) == 0) {
        const char *found = NULL;
        given += 7 + strspn(given + 7, " ");
        for (size_t i = 0; i < o->num_keys; i++) /* all of them, whichever it is */
            if (same_key(given, o->keys[i]))
                found = o->keys[i];
        if (found != NULL) {
            name_owner(found, x->owner);
            return true;
        }
    }
    return serve_fail(&x->early, 401, "invalid_api_key", NULL, "a known key is needed: Authorization: Bearer KEY");
}

/* Without a key, on this computer alone: a page of another site that names us as its own host must not get through. */
static bool check_host(serve_exchange *x)
{
    static const char *const names[] = {"localhost", "127.0.0.1", "[::1]"};
    const char *host = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Host");
    if (!x->server->check_host || host == NULL)
        return true;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const size_t n = strlen(names[i]);
        if (strncasecmp(host, names[i], n) == 0 && (host[n] == '\0' || host[n] == ':'))
            return true;
    }
    return serve_fail(&x->early, 403, "forbidden_host", NULL,
                      "this server answers to localhost only; give it a key to use other names");
}

/* What is known from the headers. */
static void check_early(serve_exchange *x)
{
    const char *length = MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Content-Length");
    if (!check_host(x))
        return;
    if (strncmp(x->path, "/v1/", 4) == 0 && !check_key(x))
        return;
    if (length != NULL && strtoull(length, NULL, 10) > x->server->options->max_body)
        serve_fail(&x->early, 413, "body_too_large", NULL, "the body is larger than %llu bytes",
                   (unsigned long long)x->server->options->max_body);
}

/* -------------------------------------------------------------------------------------------------------- a request */

void serve_drop_body(serve_exchange *x)
{
    atomic_fetch_sub(&x->server->body_bytes, x->counted);
    x->counted = 0;
    cli_buffer_free(&x->body);
}

static void on_connection(void *opaque, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    serve_http *http = opaque;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
        *context = info != NULL ? serve_connections_add(&http->connections, info->connect_fd) : NULL;
    } else {
        serve_connections_remove(&http->connections, *context);
        *context = NULL;
    }
}

static enum MHD_Result on_body(serve_exchange *x, const char *data, size_t *bytes)
{
    const uint64_t most = x->server->options->max_body;
    serve_connections_alive(&x->http->connections, connection_of(x->connection), false);
    x->body_bytes += *bytes;
    x->counted += *bytes;
    const uint64_t all = atomic_fetch_add(&x->server->body_bytes, *bytes) + *bytes;
    if (x->early.status == 0 && x->body_bytes > most)
        serve_fail(&x->early, 413, "body_too_large", NULL, "the body is larger than %llu bytes",
                   (unsigned long long)most);
    if (x->early.status == 0 && all > BODIES * most)
        serve_fail(&x->early, 503, "busy", NULL, "too much is being sent at the same time; try again later");
    if (x->early.status == 0 && !cli_buffer_add(&x->body, data, *bytes))
        serve_fail(&x->early, 503, "no_memory", NULL, "no memory for the request");
    if (x->early.status != 0)
        serve_drop_body(x); /* the rest is read so that the answer gets through */
    *bytes = 0;
    return x->body_bytes > 2 * most + 1048576 ? MHD_NO : MHD_YES;
}

static enum MHD_Result on_request(void *opaque, struct MHD_Connection *connection, const char *path, const char *method,
                                  const char *version, const char *data, size_t *bytes, void **state)
{
    serve_exchange *x = *state;
    serve_http *http = opaque;
    (void)version;
    if (x == NULL) {
        *state = x = calloc(1, sizeof *x);
        if (x == NULL)
            return MHD_NO;
        x->http = http;
        x->server = http->server;
        atomic_fetch_add(&x->server->exchanges, 1);
        x->connection = connection;
        x->path = path;
        x->method = method;
        check_early(x);
        return x->early.status == 413 ? serve_send_error(x, &x->early) : MHD_YES;
    }
    if (*bytes > 0)
        return on_body(x, data, bytes);
    x->path = path;
    x->method = method;
    if (x->early.status != 0)
        return serve_send_error(x, &x->early);
    /* from here on the server takes its time; a client that does not read its answer must still not stay for ever */
    MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)x->server->options->timeout + 60u);
    serve_connections_alive(&x->http->connections, connection_of(connection), true);
    return serve_route(x);
}

static void on_completed(void *opaque, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode code)
{
    serve_exchange *x = *state;
    (void)opaque;
    if (x == NULL)
        return;
    if (code == MHD_REQUEST_TERMINATED_COMPLETED_OK)
        MHD_set_connection_option(connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)IDLE_SECONDS);
    serve_connections_alive(&x->http->connections, connection_of(connection), false);
    if (x->job != NULL) {
        if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK)
            atomic_store(&x->job->cancelled, true);
        serve_job_release(x->server->documents, x->job);
    }
    serve_drop_body(x);
    atomic_fetch_sub(&x->server->exchanges, 1);
    free(x);
    *state = NULL;
}

/* libmicrohttpd would take "%00" for the end of a path; such a path names nothing. */
static size_t unescape(void *opaque, struct MHD_Connection *connection, char *text)
{
    (void)opaque, (void)connection;
    return strlen(text); /* paths of this server have nothing to unescape */
}

static void quiet(void *opaque, const char *format, va_list args)
{
    (void)opaque, (void)format, (void)args; /* clients that go away are no news */
}

/* ---------------------------------------------------------------------------------------------------- start and end */

static int listen_at(const serve_options *o, uint16_t *port, bool *loopback)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list = NULL;
    char number[8];
    snprintf(number, sizeof number, "%u", o->port);
    const int code = getaddrinfo(o->host, number, &hints, &list);
    if (code != 0) {
        cli_fail(CLI_USAGE, "--host %s: %s", o->host, gai_strerror(code));
        return -1;
    }
    int fd = -1, yes = 1;
    for (const struct addrinfo *a = list; a != NULL && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
        if (fd < 0)
            continue;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        if (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, 64) != 0) {
            const int kept = errno;
            close(fd);
            errno = kept;
            fd = -1;
        }
    }
    freeaddrinfo(list);
    if (fd < 0) {
        cli_fail(CLI_IO, "cannot listen at %s port %u: %s", o->host, o->port, strerror(errno));
        return -1;
    }
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    memset(&address, 0, sizeof address);
    getsockname(fd, (struct sockaddr *)&address, &length);
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)&address;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)&address;
    const bool six = address.ss_family == AF_INET6;
    *port = ntohs(six ? v6->sin6_port : v4->sin_port);
    *loopback = six ? IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) : ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    return fd;
}

int serve_http_start(serve_server *server, serve_http **out, uint16_t *port)
{
    const serve_options *o = server->options;
    bool loopback = false;
    serve_http *http = calloc(1, sizeof *http);
    if (http == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory for the server");
    *out = http;
    http->server = server;
    const unsigned most = (unsigned)(o->slots + o->queue + SPARE_CONNECTIONS);
    serve_connections_init(&http->connections, most);
    http->socket = listen_at(o, port, &loopback);
    if (http->socket < 0)
        return CLI_IO;
    server->check_host = loopback && o->num_keys == 0;
    if (!loopback && o->num_keys == 0)
        cli_warn("anybody who reaches %s can use this server and read its documents; --api-key-file asks for a key",
                 o->host);
    http->daemon = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | MHD_USE_ITC |
            MHD_USE_ERROR_LOG,
        0, NULL, NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, quiet, NULL, MHD_OPTION_LISTEN_SOCKET,
        http->socket, MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL, MHD_OPTION_NOTIFY_CONNECTION, on_connection, http,
        MHD_OPTION_UNESCAPE_CALLBACK, unescape, NULL, MHD_OPTION_CONNECTION_LIMIT, most + LEAVING_CONNECTIONS,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS, MHD_OPTION_THREAD_STACK_SIZE, (size_t)1 << 20,
        MHD_OPTION_END);
    return http->daemon != NULL ? CLI_OK : cli_fail(CLI_IO, "cannot start the HTTP server: %s", strerror(errno));
}

void serve_http_refuse(serve_http *http, double seconds)
{
    const double until = cli_now() + seconds;
    while (atomic_load(&http->server->exchanges) > 0 && cli_now() < until)
        usleep(20000);
    const MHD_socket fd = MHD_quiesce_daemon(http->daemon);
    if (fd != MHD_INVALID_SOCKET)
        close(fd);
}

void serve_http_stop(serve_http *http)
{
    if (http == NULL)
        return;
    if (http->daemon != NULL)
        MHD_stop_daemon(http->daemon);
    else if (http->socket >= 0)
        close(http->socket);
    serve_connections_destroy(&http->connections);
    free(http);
}
