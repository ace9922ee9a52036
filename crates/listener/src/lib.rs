//! Listening sockets for the controller and racks, with authentication, message sizes and HTTP/2 limits.
//!
//! * [`security`]: certificates, roles, and counters of rejections
//! * [`message_size`]: the largest message of each kind of caller

pub mod message_size;
pub mod security;

use std::time::Duration;

/// Interval of HTTP/2 pings to a peer that sends nothing.
const HTTP2_KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Time without an answer to a ping after which the connection is closed, even if TCP still considers it open.
const HTTP2_KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time within which a new stream to a controller or rack controller must send its registration message.
pub const STREAM_REGISTRATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent streams per connection. A daemon opens one stream, while a command opens several.
const MAX_STREAMS_PER_CONNECTION: u32 = 32;
/// Maximum HTTP/2 frame size in bytes. It is the smallest value that HTTP/2 permits.
const MAX_HTTP2_FRAME_BYTES: u32 = 16 << 10;
/// HTTP/2 flow-control window in bytes. It has room for a rack controller's summaries of one report interval.
const HTTP2_FLOW_CONTROL_WINDOW_BYTES: u32 = 256 << 10;

/// Returns a builder of gRPC servers for controllers and rack controllers. The servers detect broken connections.
pub fn grpc_server_builder() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(HTTP2_KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(HTTP2_KEEP_ALIVE_TIMEOUT))
        .max_concurrent_streams(Some(MAX_STREAMS_PER_CONNECTION))
        .max_frame_size(Some(MAX_HTTP2_FRAME_BYTES))
        .initial_stream_window_size(HTTP2_FLOW_CONTROL_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_FLOW_CONTROL_WINDOW_BYTES)
}
