//! Acceptor of TLS connections. It limits handshakes, verifies peers, and closes connections with invalid certificates.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_rustls::TlsAcceptor;
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use crate::caller::ConnectionCaller;
use crate::certificate::{Certificate, CertificateFingerprint, unix_now};
use crate::credentials::Credentials;
use crate::failure::{ConnectionFailureCounters, ConnectionFailureReason, PeerConnectionFailure};
use crate::identity::{FleetIdentity, FleetRole};
use crate::io::PlainOrTlsStream;
use crate::tls::ReloadableTlsCredentials;
use crate::verify::ClientCertificatePolicy;
use crate::verify::{ClientCertificateVerifier, RevocationList};

/// Interval at which the certificates of open connections are checked for validity.
const CERTIFICATE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
const ACCEPT_QUEUE_LENGTH: usize = 64;
/// Pause after the listening socket has failed to accept a connection, for example because too many files are open.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(10);

/// Limits that an acceptor enforces on handshakes and connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcceptorLimits {
    /// Time limit from the TCP connection to the end of the TLS handshake.
    pub handshake_timeout: Duration,
    pub max_concurrent_handshakes: usize,
    pub max_handshakes_per_address: usize,
    /// Maximum number of concurrent connections whose certificates contain the same identity.
    pub max_connections_per_identity: usize,
}

impl Default for AcceptorLimits {
    fn default() -> Self {
        Self {
            handshake_timeout: Duration::from_secs(5),
            max_concurrent_handshakes: 1024,
            max_handshakes_per_address: 64,
            max_connections_per_identity: 16,
        }
    }
}

#[derive(Debug)]
pub struct ConnectionAcceptor {
    tls_settings: Option<TlsSettings>,
    limits: AcceptorLimits,
    failure_counters: Arc<ConnectionFailureCounters>,
    connections: Mutex<ConnectionRegistry>,
}

#[derive(Debug)]
struct TlsSettings {
    reloadable_credentials: Arc<ReloadableTlsCredentials>,
    accepted_roles: Vec<FleetRole>,
    client_certificates: ClientCertificatePolicy,
    protocols: &'static [&'static str],
    revocation_list: RevocationList,
    /// Credentials with which the open connections were last checked.
    last_checked_credentials: Mutex<Arc<Credentials>>,
    server_config_cache: Mutex<Option<(Arc<Credentials>, Arc<ServerConfig>)>>,
}

#[derive(Debug, Default)]
struct ConnectionRegistry {
    handshake_counts_by_address: HashMap<IpAddr, usize>,
    running_handshake_count: usize,
    connections_by_number: HashMap<u64, Arc<TrackedConnection>>,
    connection_counts_by_identity: HashMap<FleetIdentity, usize>,
    last_connection_number: u64,
}

#[derive(Debug)]
struct TrackedConnection {
    identity: FleetIdentity,
    fingerprint: CertificateFingerprint,
    certificate_chain: Vec<CertificateDer<'static>>,
    certificate_not_after: Duration,
    is_closed: AtomicBool,
    reader_waker: Mutex<Option<Waker>>,
}

impl TrackedConnection {
    /// Closes the connection if the verifier does not accept its peer's certificate.
    fn close_if_untrusted(&self, verifier: &ClientCertificateVerifier) {
        let Some((end_entity, intermediates)) = self.certificate_chain.split_first() else { return };
        if let Err(error) = verifier.verify_client_cert(end_entity, intermediates, UnixTime::now())
            && !self.is_closed()
        {
            tracing::warn!(
                event = "connection-closed",
                peer = %self.identity,
                %error,
                "the daemon closes the connection: the changed `ca` no longer covers the peer's certificate"
            );
            self.close();
        }
    }

    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        if let Some(reader) = self.reader_waker.lock().take() {
            reader.wake();
        }
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

impl ConnectionAcceptor {
    pub fn without_tls(limits: AcceptorLimits, failure_counters: Arc<ConnectionFailureCounters>) -> Arc<Self> {
        Arc::new(Self { tls_settings: None, limits, failure_counters, connections: Mutex::default() })
    }

    /// Creates an acceptor that requires a valid certificate with one of these roles. Its TLS handshake offers
    /// `protocols` by ALPN.
    pub fn with_tls(
        tls: Arc<ReloadableTlsCredentials>,
        accepted_roles: &[FleetRole],
        client_certificates: ClientCertificatePolicy,
        protocols: &'static [&'static str],
        revocation_list: RevocationList,
        limits: AcceptorLimits,
        failures: Arc<ConnectionFailureCounters>,
    ) -> Arc<Self> {
        let (accepted_roles, config, checked_credentials) =
            (accepted_roles.to_vec(), Mutex::default(), Mutex::new(tls.credentials()));
        let tls_settings = Some(TlsSettings {
            reloadable_credentials: tls,
            accepted_roles,
            client_certificates,
            protocols,
            revocation_list,
            last_checked_credentials: checked_credentials,
            server_config_cache: config,
        });
        Arc::new(Self { tls_settings, limits, failure_counters: failures, connections: Mutex::default() })
    }

    fn lock_connections(&self) -> MutexGuard<'_, ConnectionRegistry> {
        self.connections.lock()
    }

    /// Returns a stream of accepted connections. No further connections are accepted after the stream is dropped.
    pub fn accepted_connections(
        self: Arc<Self>,
        listener: TcpListener,
    ) -> impl Stream<Item = io::Result<AcceptedConnection>> {
        let (sender, receiver) = mpsc::channel(ACCEPT_QUEUE_LENGTH);
        tokio::spawn(async move {
            tokio::select! {
                () = self.accept_connections(&listener, &sender) => {}
                () = sender.closed() => {}
            }
        });
        tokio_stream::wrappers::ReceiverStream::new(receiver)
    }

    async fn accept_connections(
        self: &Arc<Self>,
        listener: &TcpListener,
        connection_sender: &mpsc::Sender<io::Result<AcceptedConnection>>,
    ) {
        let mut certificate_check_ticks = tokio::time::interval(CERTIFICATE_CHECK_INTERVAL);
        certificate_check_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let accept_result = tokio::select! {
                accept_result = listener.accept() => accept_result,
                _ = certificate_check_ticks.tick() => {
                    self.close_invalid_connections();
                    continue;
                }
            };
            let (stream, address) = match accept_result {
                Ok(connection) => connection,
                Err(error) => {
                    self.failure_counters.count_and_log(&"a connection", &PeerConnectionFailure::from_io_error(&error));
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                    continue;
                }
            };
            // Limits are checked before a task is spawned, so that a flood costs little.
            let Ok(handshake_slot) = self.reserve_handshake_slot(address) else { continue };
            let (acceptor, connection_sender) = (self.clone(), connection_sender.clone());
            tokio::spawn(async move {
                if let Ok(connection) = acceptor.accept_peer(stream, address, handshake_slot).await {
                    // Sending fails if the receiver has been dropped. The connection is then closed.
                    drop(connection_sender.send(Ok(connection)).await);
                }
            });
        }
    }

    fn reserve_handshake_slot(self: &Arc<Self>, address: SocketAddr) -> Result<HandshakeSlot, PeerConnectionFailure> {
        HandshakeSlot::reserve(self, address.ip())
            .inspect_err(|failure| self.failure_counters.count_and_log(&address, failure))
    }

    /// Completes the handshake of a connection that another listener has accepted. Counts and logs a rejection.
    pub async fn admit_connection(
        self: Arc<Self>,
        stream: TcpStream,
        address: SocketAddr,
    ) -> Result<AcceptedConnection, PeerConnectionFailure> {
        let handshake_slot = self.reserve_handshake_slot(address)?;
        self.accept_peer(stream, address, handshake_slot).await
    }

    async fn accept_peer(
        self: &Arc<Self>,
        stream: TcpStream,
        address: SocketAddr,
        handshake_slot: HandshakeSlot,
    ) -> Result<AcceptedConnection, PeerConnectionFailure> {
        let handshake_result = self.complete_handshake(stream, address).await;
        drop(handshake_slot);
        handshake_result.inspect_err(|failure| self.failure_counters.count_and_log(&address, failure))
    }

    async fn complete_handshake(
        self: &Arc<Self>,
        stream: TcpStream,
        address: SocketAddr,
    ) -> Result<AcceptedConnection, PeerConnectionFailure> {
        stream.set_nodelay(true).map_err(|error| PeerConnectionFailure::from_io_error(&error))?;
        let Some(tls_settings) = &self.tls_settings else {
            let caller = ConnectionCaller { address, identity: None, is_encrypted: false };
            return Ok(AcceptedConnection {
                stream: PlainOrTlsStream::Plain(stream),
                caller,
                registration_guard: None,
            });
        };
        let acceptor = TlsAcceptor::from(tls_settings.current_server_config()?);
        let result = tokio::time::timeout(self.limits.handshake_timeout, acceptor.accept(stream)).await;
        let tls_stream = result
            .map_err(|_| {
                let message = format!("no handshake within {:?}", self.limits.handshake_timeout);
                PeerConnectionFailure { reason: ConnectionFailureReason::Timeout, failure_description: message }
            })?
            .map_err(|error| PeerConnectionFailure::from_io_error(&error))?;
        let certificate_chain = tls_stream.get_ref().1.peer_certificates().unwrap_or_default().to_vec();
        let certificate = certificate_chain.first().map(Certificate::parse_der).transpose();
        let certificate = certificate.map_err(|message| PeerConnectionFailure {
            reason: ConnectionFailureReason::NoIdentity,
            failure_description: message,
        })?;
        let connection_guard = match certificate {
            Some(certificate) => Some(self.register_connection(&certificate, certificate_chain)?),
            None => None,
        };
        let identity = connection_guard.as_ref().map(|guard| guard.connection.identity.clone());
        let caller = ConnectionCaller { address, identity, is_encrypted: true };
        Ok(AcceptedConnection {
            stream: PlainOrTlsStream::Tls(Box::new(tls_stream.into())),
            caller,
            registration_guard: connection_guard,
        })
    }

    fn register_connection(
        self: &Arc<Self>,
        certificate: &Certificate,
        chain: Vec<CertificateDer<'static>>,
    ) -> Result<ConnectionRegistrationGuard, PeerConnectionFailure> {
        let no_identity_failure = || PeerConnectionFailure {
            reason: ConnectionFailureReason::NoIdentity,
            failure_description: "its certificate has no identity".to_owned(),
        };
        let identity = certificate.identity.clone().ok_or_else(no_identity_failure)?;
        let mut connections = self.lock_connections();
        let identity_connection_count = connections.connection_counts_by_identity.entry(identity.clone()).or_default();
        if *identity_connection_count >= self.limits.max_connections_per_identity {
            let message = format!("{identity} has {identity_connection_count} connections, which is the limit");
            return Err(PeerConnectionFailure {
                reason: ConnectionFailureReason::TooManyConnections,
                failure_description: message,
            });
        }
        *identity_connection_count += 1;
        connections.last_connection_number += 1;
        let connection_number = connections.last_connection_number;
        let connection = Arc::new(TrackedConnection {
            identity,
            fingerprint: certificate.fingerprint,
            certificate_chain: chain,
            certificate_not_after: certificate.not_after,
            is_closed: AtomicBool::new(false),
            reader_waker: Mutex::default(),
        });
        connections.connections_by_number.insert(connection_number, connection.clone());
        Ok(ConnectionRegistrationGuard { acceptor: self.clone(), connection_number, connection })
    }

    /// Periodically closes the connections whose certificates have expired or are revoked. Users of
    /// [`Self::admit_connection`] must run this loop.
    pub async fn close_invalid_connections_periodically(&self) -> std::convert::Infallible {
        let mut certificate_check_ticks = tokio::time::interval(CERTIFICATE_CHECK_INTERVAL);
        certificate_check_ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            certificate_check_ticks.tick().await;
            self.close_invalid_connections();
        }
    }

    fn close_invalid_connections(&self) {
        self.close_invalid_connections_at(unix_now());
    }

    pub(crate) fn close_invalid_connections_at(&self, now: Duration) {
        let Some(tls_settings) = &self.tls_settings else { return };
        if let Some(verifier) = tls_settings.verifier_if_authority_removed() {
            let tracked_connections: Vec<Arc<TrackedConnection>> =
                self.lock_connections().connections_by_number.values().cloned().collect();
            // Verifying thousands of certificates takes as long as thousands of handshakes, so another thread does it.
            std::thread::spawn(move || {
                tracked_connections.iter().for_each(|connection| connection.close_if_untrusted(&verifier))
            });
        }
        for connection in
            self.lock_connections().connections_by_number.values().filter(|connection| !connection.is_closed())
        {
            let is_revoked = tls_settings.revocation_list.contains(&connection.fingerprint);
            if is_revoked || connection.certificate_not_after < now {
                let problem = if is_revoked { "is revoked" } else { "has expired" };
                let peer = &connection.identity;
                tracing::warn!(
                    event = "connection-closed",
                    %peer,
                    "the daemon closes the connection: the peer's certificate {problem}"
                );
                connection.close();
            }
        }
    }
}

impl TlsSettings {
    /// Returns a verifier if an authority was removed since the last call. The open connections must then be checked
    /// again.
    fn verifier_if_authority_removed(&self) -> Option<ClientCertificateVerifier> {
        let credentials = self.reloadable_credentials.credentials();
        let mut checked_credentials = self.last_checked_credentials.lock();
        let previous_credentials = std::mem::replace(&mut *checked_credentials, credentials.clone());
        let is_still_trusted =
            |old: &Certificate| credentials.authorities.iter().any(|new| new.fingerprint == old.fingerprint);
        if Arc::ptr_eq(&previous_credentials, &credentials)
            || previous_credentials.authorities.iter().all(is_still_trusted)
        {
            return None;
        }
        let verifier = credentials.build_client_verifier(
            &self.accepted_roles,
            self.client_certificates,
            self.revocation_list.clone(),
        );
        let verifier = verifier.inspect_err(|error| {
            tracing::warn!(
                event = "connections-not-verified",
                error = format!("{error:#}"),
                "the daemon cannot verify open connections against the changed `ca`: the connections stay open"
            );
        });
        verifier.ok()
    }

    fn current_server_config(&self) -> Result<Arc<ServerConfig>, PeerConnectionFailure> {
        let credentials = self.reloadable_credentials.credentials();
        let mut config = self.server_config_cache.lock();
        if let Some((config_credentials, config)) = &*config
            && Arc::ptr_eq(config_credentials, &credentials)
        {
            return Ok(config.clone());
        }
        let new_config = credentials.build_server_config(
            &self.accepted_roles,
            self.client_certificates,
            self.revocation_list.clone(),
            self.protocols,
        );
        let new_config = Arc::new(new_config.map_err(|error| PeerConnectionFailure {
            reason: ConnectionFailureReason::OtherFailure,
            failure_description: format!("{error:#}"),
        })?);
        *config = Some((credentials, new_config.clone()));
        Ok(new_config)
    }
}

struct HandshakeSlot {
    acceptor: Arc<ConnectionAcceptor>,
    address: IpAddr,
}

impl HandshakeSlot {
    fn reserve(acceptor: &Arc<ConnectionAcceptor>, address: IpAddr) -> Result<Self, PeerConnectionFailure> {
        let mut connections = acceptor.lock_connections();
        let (handshake_count, limits) = (connections.running_handshake_count, &acceptor.limits);
        let address_handshake_count = connections.handshake_counts_by_address.get(&address).copied().unwrap_or(0);
        if handshake_count >= limits.max_concurrent_handshakes
            || address_handshake_count >= limits.max_handshakes_per_address
        {
            let message = format!(
                "{address_handshake_count} handshakes of its address, {handshake_count} in all, are not done, which \
                 is the limit"
            );
            return Err(PeerConnectionFailure {
                reason: ConnectionFailureReason::TooManyConnections,
                failure_description: message,
            });
        }
        connections.handshake_counts_by_address.insert(address, address_handshake_count + 1);
        connections.running_handshake_count += 1;
        drop(connections);
        Ok(Self { acceptor: acceptor.clone(), address })
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        let mut connections = self.acceptor.lock_connections();
        connections.running_handshake_count -= 1;
        if let Some(count) = connections.handshake_counts_by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                connections.handshake_counts_by_address.remove(&self.address);
            }
        }
    }
}

#[derive(Debug)]
struct ConnectionRegistrationGuard {
    acceptor: Arc<ConnectionAcceptor>,
    connection_number: u64,
    connection: Arc<TrackedConnection>,
}

impl Drop for ConnectionRegistrationGuard {
    fn drop(&mut self) {
        let mut connections = self.acceptor.lock_connections();
        connections.connections_by_number.remove(&self.connection_number);
        if let Some(count) = connections.connection_counts_by_identity.get_mut(&self.connection.identity) {
            *count -= 1;
            if *count == 0 {
                connections.connection_counts_by_identity.remove(&self.connection.identity);
            }
        }
    }
}

#[derive(Debug)]
pub struct AcceptedConnection {
    stream: PlainOrTlsStream,
    caller: ConnectionCaller,
    registration_guard: Option<ConnectionRegistrationGuard>,
}

impl AcceptedConnection {
    pub fn caller(&self) -> &ConnectionCaller {
        &self.caller
    }

    /// Returns the fingerprint and the expiry (time since 1970) of the peer's certificate, or `None` if there is none.
    pub fn certificate_fingerprint_and_expiry(&self) -> Option<(CertificateFingerprint, Duration)> {
        self.registration_guard
            .as_ref()
            .map(|guard| (guard.connection.fingerprint, guard.connection.certificate_not_after))
    }

    /// Moves the connection to another runtime. Fails if the process has too many open files.
    pub fn move_to_runtime(mut self, runtime: &Handle) -> io::Result<Self> {
        self.stream.move_to_runtime(runtime)?;
        Ok(self)
    }

    fn is_closed(&self) -> bool {
        self.registration_guard.as_ref().is_some_and(|guard| guard.connection.is_closed())
    }
}

fn closed_connection_error() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the certificate has expired or is revoked")
}

impl Connected for AcceptedConnection {
    type ConnectInfo = ConnectionCaller;

    fn connect_info(&self) -> ConnectionCaller {
        self.caller.clone()
    }
}

impl AsyncRead for AcceptedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(guard) = &self.registration_guard {
            *guard.connection.reader_waker.lock() = Some(context.waker().clone());
        }
        // This is checked after the waker is registered, so that a close in between wakes the task.
        if self.is_closed() {
            return Poll::Ready(Err(closed_connection_error()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for AcceptedConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.is_closed() {
            return Poll::Ready(Err(closed_connection_error()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.is_closed() {
            return Poll::Ready(Err(closed_connection_error()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
