/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_http.c - whole requests from nowhere through the handlers of `akv serve` (http.c, routes.c and what they call),
 * as libmicrohttpd would hand them over; this file stands in for it, fake_server.c for what is behind.
 *
 * An input is one byte of choices and then, in HTTP's form, METHOD PATH, headers, an empty line, a body.
 */
#include "cli/serve/http.h"
#include "fake_server.h"
#include "fuzz.h"

#include <stdarg.h>
#include <sys/socket.h>

enum { MAX_HEADERS = 24, KEYS = 1, ENDING = 2, LOOPBACK = 4, LEAVES = 8 };

struct MHD_Response {
    char *data;
    size_t bytes;
    ssize_t (*read)(void *, uint64_t, char *, size_t);
    void *opaque;
    bool owned;
    char type[80];
};

struct MHD_Connection {
    struct {
        const char *name, *value;
    } headers[MAX_HEADERS];
    size_t num_headers;
    unsigned status; /* of the answer; 0 = none yet */
    struct MHD_Response *response;
    void *context;
};

static struct {
    MHD_AccessHandlerCallback handler;
    MHD_RequestCompletedCallback completed;
    void *opaque, *completed_opaque;
    MHD_NotifyConnectionCallback connected;
    void *connected_opaque;
    int fd; /* a connection that is open and has nothing to say */
} http;
static long responses;

/* ---------------------------------------------------------------------------------------------- libmicrohttpd's part */

struct MHD_Daemon *MHD_start_daemon(unsigned flags, uint16_t port, MHD_AcceptPolicyCallback accept, void *accept_opaque,
                                    MHD_AccessHandlerCallback handler, void *opaque, ...)
{
    va_list args;
    (void)flags, (void)port, (void)accept, (void)accept_opaque;
    http.handler = handler;
    http.opaque = opaque;
    va_start(args, opaque);
    for (int option; (option = va_arg(args, int)) != MHD_OPTION_END;) {
        switch (option) {
        case MHD_OPTION_NOTIFY_COMPLETED:
            http.completed = va_arg(args, MHD_RequestCompletedCallback);
            http.completed_opaque = va_arg(args, void *);
            break;
        case MHD_OPTION_NOTIFY_CONNECTION:
            http.connected = va_arg(args, MHD_NotifyConnectionCallback);
            http.connected_opaque = va_arg(args, void *);
            break;
        case MHD_OPTION_EXTERNAL_LOGGER:
        case MHD_OPTION_UNESCAPE_CALLBACK:
            (void)va_arg(args, void *); /* a function and what it is called with: pointers both */
            (void)va_arg(args, void *);
            break;
        case MHD_OPTION_LISTEN_SOCKET: (void)va_arg(args, int); break;
        case MHD_OPTION_CONNECTION_LIMIT:
        case MHD_OPTION_CONNECTION_TIMEOUT: (void)va_arg(args, unsigned); break;
        case MHD_OPTION_THREAD_STACK_SIZE: (void)va_arg(args, size_t); break;
        default: HOLDS(0, "option %d of MHD_start_daemon is not known here", option);
        }
    }
    va_end(args);
    return (struct MHD_Daemon *)&http;
}

void MHD_stop_daemon(struct MHD_Daemon *daemon)
{
    (void)daemon;
}

MHD_socket MHD_quiesce_daemon(struct MHD_Daemon *daemon)
{
    (void)daemon;
    return MHD_INVALID_SOCKET;
}

const char *MHD_lookup_connection_value(struct MHD_Connection *c, enum MHD_ValueKind kind, const char *name)
{
    (void)kind;
    for (size_t i = 0; i < c->num_headers; i++)
        if (strcasecmp(c->headers[i].name, name) == 0)
            return c->headers[i].value;
    return NULL;
}

const union MHD_ConnectionInfo *MHD_get_connection_info(struct MHD_Connection *c, enum MHD_ConnectionInfoType type, ...)
{
    static union MHD_ConnectionInfo info;
    info = (union MHD_ConnectionInfo){0};
    if (type == MHD_CONNECTION_INFO_CONNECTION_FD)
        info.connect_fd = http.fd;
    else if (type == MHD_CONNECTION_INFO_SOCKET_CONTEXT)
        info.socket_context = c->context;
    else
        return NULL;
    return &info;
}

enum MHD_Result MHD_set_connection_option(struct MHD_Connection *c, enum MHD_CONNECTION_OPTION option, ...)
{
    (void)c, (void)option;
    return MHD_YES;
}

static struct MHD_Response *response_new(void)
{
    struct MHD_Response *r = calloc(1, sizeof *r);
    HOLDS(r != NULL, "no memory");
    responses++;
    return r;
}

struct MHD_Response *MHD_create_response_from_buffer(size_t bytes, void *data, enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *r = response_new();
    HOLDS(mode != MHD_RESPMEM_MUST_COPY, "not made for it");
    r->data = data;
    r->bytes = bytes;
    r->owned = mode == MHD_RESPMEM_MUST_FREE;
    return r;
}

struct MHD_Response *MHD_create_response_from_callback(uint64_t size, size_t block, MHD_ContentReaderCallback read,
                                                       void *opaque, MHD_ContentReaderFreeCallback release)
{
    struct MHD_Response *r = response_new();
    HOLDS(size == MHD_SIZE_UNKNOWN && block > 0 && release == NULL, "not made for it");
    r->read = read;
    r->opaque = opaque;
    return r;
}

enum MHD_Result MHD_add_response_header(struct MHD_Response *r, const char *name, const char *value)
{
    HOLDS(*value != '\0' && strpbrk(value, "\r\n") == NULL, "header %s would break the answer", name);
    if (strcmp(name, "Content-Type") == 0)
        snprintf(r->type, sizeof r->type, "%s", value);
    return MHD_YES;
}

enum MHD_Result MHD_queue_response(struct MHD_Connection *c, unsigned status, struct MHD_Response *r)
{
    HOLDS(c->status == 0, "a second answer");
    HOLDS(status >= 200 && status < 600 && r->type[0] != '\0', "status %u, type \"%s\"", status, r->type);
    c->status = status;
    c->response = r;
    return MHD_YES;
}

/* The server gives its reference back as soon as it has queued; this file needs the response once more. */
void MHD_destroy_response(struct MHD_Response *r)
{
    (void)r;
}

/* ------------------------------------------------------------------------------------------------------ one request */

static void check_answer(struct MHD_Connection *c, bool leaves)
{
    struct MHD_Response *r = c->response;
    char piece[100];
    if (r->read != NULL) {
        ssize_t n = 0;
        for (uint64_t at = 0; !leaves && (n = r->read(r->opaque, at, piece, sizeof piece)) > 0; at += (uint64_t)n)
            HOLDS((size_t)n <= sizeof piece, "%zd bytes into %zu", n, sizeof piece);
        HOLDS(leaves || n == MHD_CONTENT_READER_END_OF_STREAM, "a stream that ends with %zd", n);
    } else if (strcmp(r->type, "application/json") == 0) {
        cJSON *root = fake_parse(r->data, r->bytes);
        const cJSON *error = cJSON_GetObjectItem(root, "error");
        HOLDS(c->status < 400 || cJSON_GetStringValue(cJSON_GetObjectItem(error, "message")) != NULL ||
                  cJSON_GetObjectItem(root, "status") != NULL, "status %u without a sentence", c->status);
        cJSON_Delete(root);
    } else {
        HOLDS(c->status == 200 && r->bytes > 0, "status %u as %s", c->status, r->type);
    }
}

static void run(struct MHD_Connection *c, const char *method, const char *path, char *body, size_t bytes, size_t piece,
                bool leaves)
{
    void *state = NULL;
    size_t none = 0;
    http.connected(http.connected_opaque, c, &c->context, MHD_CONNECTION_NOTIFY_STARTED);
    HOLDS(c->context != NULL, "no memory");
    enum MHD_Result ok = http.handler(http.opaque, c, path, method, "HTTP/1.1", NULL, &none, &state);
    for (size_t at = 0; ok == MHD_YES && c->status == 0 && at < bytes;) {
        size_t n = bytes - at < piece ? bytes - at : piece;
        at += n;
        ok = http.handler(http.opaque, c, path, method, "HTTP/1.1", body + at - n, &n, &state);
        HOLDS(ok != MHD_YES || n == 0, "%zu bytes of a body were not taken", n);
        if (leaves && at > bytes / 2)
            ok = MHD_NO; /* the client goes away */
    }
    if (ok == MHD_YES && c->status == 0)
        ok = http.handler(http.opaque, c, path, method, "HTTP/1.1", NULL, &none, &state);
    HOLDS(ok != MHD_YES || c->status != 0, "no answer");
    if (c->status != 0)
        check_answer(c, leaves);
    http.completed(http.completed_opaque, c, &state,
                   leaves || ok != MHD_YES ? MHD_REQUEST_TERMINATED_CLIENT_ABORT : MHD_REQUEST_TERMINATED_COMPLETED_OK);
    http.connected(http.connected_opaque, c, &c->context, MHD_CONNECTION_NOTIFY_CLOSED);
    HOLDS(state == NULL, "a request that was not forgotten");
    if (c->response != NULL) {
        responses--;
        if (c->response->owned)
            free(c->response->data);
        free(c->response);
    }
}

/* Cuts `text` at the next of `ends`; NULL when there is none. */
static char *cut(char **text, const char *ends)
{
    char *begin = *text, *end = strpbrk(begin, ends);
    if (end == NULL)
        return NULL;
    *text = end + 1;
    *end = '\0';
    return begin;
}

const unsigned char serve_page[] = "<html>";
const size_t serve_page_bytes = sizeof serve_page - 1;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char one[] = "secret", other[] = "another-one", *keys[] = {one, other};
    static serve_options options = {.host = "127.0.0.1", .keep_ratio = 0.1, .max_tokens = 512, .max_body = 4096,
                                    .slots = 2, .queue = 2, .timeout = 10.0, .keys = keys};
    static serve_server server = {.options = &options, .model_id = "m", .model.train_context = 2048};
    if (http.handler == NULL) {
        static serve_http *started; /* to the end */
        uint16_t port = 0;
        int pair[2];
        options.num_keys = 1;
        HOLDS(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "no sockets");
        http.fd = pair[0];
        HOLDS(serve_http_start(&server, &started, &port) == CLI_OK && http.handler && http.completed, "no server");
    }
    if (size < 2 || size > 1u << 15)
        return 0;
    const uint8_t choices = data[0];
    options.num_keys = choices & KEYS ? 2 : 0;
    server.check_host = (choices & LOOPBACK) != 0 && options.num_keys == 0;
    atomic_store(&server.ending, (choices & ENDING) != 0);
    char *text = malloc(size);
    HOLDS(text != NULL, "no memory");
    memcpy(text, data + 1, size - 1);
    text[size - 1] = '\0';
    const size_t head = strlen(text); /* a zero byte: libmicrohttpd refuses it in the head, a body may have it */
    struct MHD_Connection connection = {.num_headers = 0};
    char *at = text, *method = cut(&at, " "), *path = method != NULL ? cut(&at, "\n") : NULL;
    while (path != NULL && at < text + head && *at != '\n' && connection.num_headers < MAX_HEADERS) {
        char *line = cut(&at, "\n"), *name = line != NULL ? cut(&line, ":") : NULL;
        if (name == NULL)
            break;
        connection.headers[connection.num_headers].name = name;
        connection.headers[connection.num_headers++].value = line + strspn(line, " ");
    }
    if (path != NULL && *method != '\0') {
        char *body = at + (at < text + size - 1 && *at == '\n');
        const size_t bytes = (size_t)(text + size - 1 - body);
        fake_say(body, bytes < 64 ? bytes : 64, 1 + bytes % 9);
        path[strcspn(path, "? ")] = '\0';
        const size_t piece = choices >> 4 == 0 ? 100000 : (size_t)1 << (choices >> 4);
        run(&connection, method, path, body, bytes, piece, (choices & LEAVES) != 0);
    }
    HOLDS(atomic_load(&server.body_bytes) == 0 && atomic_load(&server.exchanges) == 0, "sums that are not even");
    HOLDS(responses == 0, "%ld answers were not released", responses);
    fake_check_balance();
    free(text);
    return 0;
}
