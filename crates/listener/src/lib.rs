//! Listening sockets of the controller and of racks: authentication, sizes of messages, and the limits of HTTP/2.
//!
//! * [`security`]: certificates, roles, and what is counted of refused connections
//! * [`message_size`]: the largest message of each kind of caller

pub mod message_size;
pub mod security;

use std::time::Duration;

/// How often a silent peer is pinged (HTTP/2).
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// A peer that answers no ping for this long is gone, whatever TCP thinks.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a stream may take to say who it is, here and at racks.
pub const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(10);
/// At a time on one connection: a part has one, and somebody who asks some.
const STREAMS: u32 = 32;
/// Of HTTP/2; the least that there can be.
const FRAME_BYTES: u32 = 16 << 10;
/// What a part may send before it is told that some of it was read (HTTP/2): a rack's summaries of one interval.
const WINDOW_BYTES: u32 = 256 << 10;

/// What listens for agents, here and at racks: it notices who has gone.
pub fn builder() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
        .max_concurrent_streams(Some(STREAMS))
        .max_frame_size(Some(FRAME_BYTES))
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
}
