//! HTTP/1.1 server on a thread of its own, so that large answers and many callers do not delay placement tables.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use coreward_tls::certificate::CertificateFingerprint;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use crate::connection_limit::{ConnectionPermit, ConnectionSlots, TrackedResponseBody};
use crate::request_work;
use coreward_api::Role;

/// Limits that a server enforces on each of its connections and on their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Maximum number of concurrent connections. At the limit, a new connection replaces an idle one, or waits.
    pub max_connections: usize,
    /// Time limit for receiving a request's head. It starts at the end of the handshake or of the previous answer. The
    /// time from the head to the end of the answer is not limited.
    pub request_head_timeout: Duration,
    /// Maximum size of a request's head (request line and header fields), in bytes.
    pub max_request_head_bytes: usize,
    /// Time after which the server disconnects a client that does not read its answer.
    pub write_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            max_connections: 512,
            request_head_timeout: Duration::from_secs(10),
            max_request_head_bytes: 32 << 10,
            write_timeout: Duration::from_secs(20),
        }
    }
}

/// Peer of a connection. The server attaches it to every request as an extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionPeer {
    /// Address of the peer.
    pub address: IpAddr,
    /// Identity of the peer in its certificate, or `None` if the peer has no certificate.
    pub certificate: Option<CertificateIdentity>,
    /// Whether the connection is encrypted.
    pub is_connection_encrypted: bool,
}

/// Identity of an operator or a viewer who is authenticated by a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateIdentity {
    /// Role that the certificate grants.
    pub role: Role,
    /// Name of the certificate's owner.
    pub name: Arc<str>,
    /// Fingerprint of the certificate.
    pub fingerprint: CertificateFingerprint,
    /// End of the certificate's validity, as time since 1970.
    pub not_after: Duration,
}

impl ConnectionPeer {
    /// Returns the peer of a connection without TLS.
    pub fn without_tls(address: IpAddr) -> Self {
        Self { address, certificate: None, is_connection_encrypted: false }
    }
}

impl Default for ConnectionPeer {
    fn default() -> Self {
        Self::without_tls(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }
}

/// Acceptor that performs the TLS handshake, if any, on a new TCP connection.
pub trait StreamAcceptor: Clone + Send + Sync + 'static {
    /// Byte stream of the secured connection.
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;

    /// Completes the handshake, and returns the secured stream and its peer. The implementation must limit the
    /// handshake's duration.
    fn accept(
        &self,
        stream: TcpStream,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<(Self::Stream, ConnectionPeer)>> + Send;
}

/// Acceptor of connections without TLS.
#[derive(Debug, Clone, Copy)]
pub struct PlainTcpAcceptor;

impl StreamAcceptor for PlainTcpAcceptor {
    type Stream = TcpStream;

    async fn accept(&self, stream: TcpStream, address: SocketAddr) -> io::Result<(TcpStream, ConnectionPeer)> {
        Ok((stream, ConnectionPeer::without_tls(address.ip())))
    }
}

/// Listening socket, with the limits of its connections.
pub struct ApiListener {
    listener: std::net::TcpListener,
    address: SocketAddr,
    connection_limits: ConnectionLimits,
}

impl ApiListener {
    /// Binds a socket to the address. Fails if the address is in use or does not belong to this host.
    pub fn bind(address: SocketAddr) -> anyhow::Result<Self> {
        let expected_address = "expected a free port and an address of this host (`api`)";
        let listener = std::net::TcpListener::bind(address)
            .with_context(|| format!("cannot listen on {address}: {expected_address}"))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address, connection_limits: ConnectionLimits::default() })
    }

    /// Sets the limits of the socket's connections.
    pub fn with_connection_limits(self, connection_limits: ConnectionLimits) -> Self {
        Self { connection_limits, ..self }
    }

    /// Returns the address at which the socket listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves requests and runs `background` in a new thread. Stops when the returned guard is dropped or `background`
    /// ends. Each worker thread calls `on_thread_start` when it starts. Fails if threads cannot be created.
    pub fn serve(
        self,
        acceptor: impl StreamAcceptor,
        router: Router,
        on_thread_start: impl Fn() + Send + Sync + 'static,
        background: impl Future<Output = ()> + Send + 'static,
    ) -> anyhow::Result<RunningApiServer> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(request_work::ANSWER_WORKER_THREAD_COUNT)
            .on_thread_start(on_thread_start)
            .thread_name("api-work")
            .enable_all()
            .build()?;
        let (stop_sender, mut stop_receiver) = oneshot::channel();
        let run_api_server = move || {
            runtime.block_on(async move {
                let listener = match tokio::net::TcpListener::from_std(self.listener) {
                    Ok(listener) => listener,
                    Err(error) => {
                        tracing::error!(
                            event = "api-failed",
                            address = %self.address,
                            %error,
                            "the controller cannot serve the API: restart the controller"
                        );
                        return;
                    }
                };
                tokio::select! {
                    _ = &mut stop_receiver => {}
                    () = accept_connections(listener, self.connection_limits, acceptor, router) => {}
                    () = background => {}
                }
            });
        };
        std::thread::Builder::new().name("api".to_owned()).spawn(run_api_server)?;
        Ok(RunningApiServer { _stop_on_drop: stop_sender })
    }
}

/// Guard of a running server. The server stops when the guard is dropped.
pub struct RunningApiServer {
    _stop_on_drop: oneshot::Sender<std::convert::Infallible>,
}

async fn accept_connections(
    listener: tokio::net::TcpListener,
    connection_limits: ConnectionLimits,
    acceptor: impl StreamAcceptor,
    router: Router,
) {
    let slots = ConnectionSlots::new(connection_limits.max_connections);
    loop {
        let (stream, address) = accept_connection(&listener).await;
        let permit = Arc::new(slots.acquire_slot(address.ip()).await);
        let (acceptor, router) = (acceptor.clone(), router.clone());
        tokio::spawn(async move {
            let serve_result = tokio::select! {
                // The connection is polled first, so that a client with a new request is not disconnected as idle.
                biased;
                outcome = serve_connection(stream, address, connection_limits, &permit, acceptor, router) => outcome,
                () = permit.wait_until_slot_needed() => {
                    Err("idle, and its slot is needed for another connection".into())
                }
            };
            if let Err(error) = serve_result {
                tracing::debug!(
                    event = "api-connection-ended",
                    peer = %address,
                    %error,
                    "the connection of an API client has ended with an error"
                );
            }
        });
    }
}

/// Accepts the next connection. Retries after an error.
async fn accept_connection(listener: &tokio::net::TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(connection) => return connection,
            Err(error) => {
                // There may be too many open files, for example. The pause gives other connections time to end.
                tracing::warn!(
                    event = "accept-failed",
                    %error,
                    "the controller cannot accept a connection to the API and retries in 100 ms"
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve_connection(
    stream: TcpStream,
    address: SocketAddr,
    connection_limits: ConnectionLimits,
    permit: &Arc<ConnectionPermit>,
    acceptor: impl StreamAcceptor,
    router: Router,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    stream.set_nodelay(true)?;
    socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(connection_limits.write_timeout))?;
    let (stream, peer) = acceptor.accept(stream, address).await?;
    let router_service = TowerToHyperService::new(router.layer(axum::Extension(peer)));
    let service = service_fn(|request| {
        let (guard, answer) = (permit.begin_request(), router_service.call(request));
        async { answer.await.map(|answer| answer.map(|body| TrackedResponseBody { body, _guard: guard })) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(connection_limits.request_head_timeout)
        .max_buf_size(connection_limits.max_request_head_bytes)
        .serve_connection(TokioIo::new(stream), service)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests;
