//! Exchange of one request and its answer, each over a new connection.

use std::io;
use std::time::Duration;

use anyhow::anyhow;
use coreward_tls::connect::HttpsConnector;
use coreward_tls::io::PlainOrTlsStream;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::contact::ControllerUrl;

/// Time limit for connecting to a controller.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for receiving a complete answer. The largest has about 10 MB, for 16,384 servers with 64 cores each.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) struct PendingRequest {
    pub method: Method,
    /// Path and query of the request, without the leading `/v1/`.
    pub path_and_query: String,
    /// JSON body of the request, or `None` if it has no body.
    pub json_body: Option<Vec<u8>>,
}

/// Connects to a controller, sends a request, and returns the answer. Without a certificate, `token` authenticates the
/// caller.
pub(super) async fn connect_and_send_request(
    url: &ControllerUrl,
    tls: Option<&HttpsConnector>,
    token: Option<&str>,
    request: PendingRequest,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let io = await_with_timeout("no connection", CONNECT_TIMEOUT, async { Ok(connect_to_controller(url, tls).await?) })
        .await?;
    await_with_timeout("no answer", RESPONSE_TIMEOUT, send_request(io, url, token, request)).await
}

async fn await_with_timeout<T>(
    timeout_problem: &str,
    limit: Duration,
    future: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let timeout_result = tokio::time::timeout(limit, future).await;
    timeout_result.unwrap_or_else(|_| Err(anyhow!("{timeout_problem} within {} s", limit.as_secs())))
}

async fn connect_to_controller(url: &ControllerUrl, tls: Option<&HttpsConnector>) -> io::Result<PlainOrTlsStream> {
    let mut last_error = None;
    for address in tokio::net::lookup_host(&url.host_and_port).await? {
        let connect_result = match tls {
            Some(tls) => tls.connect(url.host(), address).await,
            None => TcpStream::connect(address).await.map(PlainOrTlsStream::Plain),
        };
        match connect_result {
            Ok(io) => return Ok(io),
            Err(error) => last_error = Some(error),
        }
    }
    Err(last_error.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address")))
}

async fn send_request(
    io: PlainOrTlsStream,
    url: &ControllerUrl,
    token: Option<&str>,
    pending_request: PendingRequest,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let mut request = Request::builder()
        .method(pending_request.method)
        .uri(format!("/v1/{}", pending_request.path_and_query))
        .header(HOST, &url.host_and_port)
        .header(ACCEPT, "application/json");
    if let Some(token) = token {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    if pending_request.json_body.is_some() {
        request = request.header(CONTENT_TYPE, "application/json");
    }
    let request = request.body(Full::new(Bytes::from(pending_request.json_body.unwrap_or_default())))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await?;
    // The connection's future completes when the sender is dropped.
    let response_future = async move {
        let response = sender.send_request(request).await?;
        let status = response.status();
        anyhow::Ok((status, response.into_body().collect().await?.to_bytes()))
    };
    let (answer, connection_result) = tokio::join!(response_future, connection);
    // The connection's error is reported because it is more precise than its sender's error.
    match (answer, connection_result) {
        (Err(_), Err(error)) => Err(error.into()),
        (answer, _) => answer,
    }
}
