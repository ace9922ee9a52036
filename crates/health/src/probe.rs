//! One health check of one server.

use std::fmt::Display;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use coreward_model::health::{HealthCheck, HealthProbe, HttpProbe, HttpStatusRange, ProbeAddress};
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST, USER_AGENT};
use hyper::http::uri::Authority;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use nix::errno::Errno;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpSocket;
use tokio_rustls::TlsConnector;

use crate::ca;
use crate::connection::{CheckedServerConnection, NatEntryGuard};
use crate::nat_path::{HealthCheckNatPath, NatTable};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    #[error("connection refused")]
    ConnectionRefused,
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    #[error("answers {0}: expected {1}")]
    UnexpectedStatus(StatusCode, HttpStatusRange),
    #[error("TLS: {0}")]
    TlsFailure(String),
    /// The HTTP response is invalid or missing.
    #[error("HTTP: {0}")]
    HttpFailure(String),
    #[error("{0}")]
    NetworkFailure(String),
    /// The check failed for a reason on this machine, so the server's state is unknown.
    #[error("not asked, as this machine lacks something: {0}")]
    LocalFailure(String),
}

impl ProbeError {
    pub fn is_local_failure(&self) -> bool {
        matches!(self, Self::LocalFailure(_))
    }

    /// Returns the local failure that caused `error`, or the result of `to_probe_error` if there is none.
    fn from_error(error: &(dyn std::error::Error + 'static), to_probe_error: impl FnOnce(String) -> Self) -> Self {
        let mut error_chain = std::iter::successors(Some(error), |error| error.source());
        let local_error = error_chain
            .find_map(|error| error.downcast_ref::<std::io::Error>().filter(|error| is_local_io_error(error)));
        local_error.map_or_else(|| to_probe_error(error.to_string()), |error| Self::LocalFailure(error.to_string()))
    }
}

/// Returns whether an I/O error has its cause on this machine: no free files, ports or memory, or a firewall rule.
fn is_local_io_error(error: &std::io::Error) -> bool {
    const LOCAL_FAILURE_ERRNOS: [Errno; 9] = [
        Errno::EMFILE,
        Errno::ENFILE,
        Errno::ENOBUFS,
        Errno::ENOMEM,
        Errno::EADDRNOTAVAIL,
        Errno::EADDRINUSE,
        // connect(2) returns this if no port is free.
        Errno::EAGAIN,
        Errno::EPERM,
        Errno::EACCES,
    ];
    error.raw_os_error().is_some_and(|number| LOCAL_FAILURE_ERRNOS.contains(&Errno::from_raw(number)))
}

/// Prober that checks the servers of one service.
pub struct HealthProber {
    health_check: Arc<HealthCheck>,
    vip: SocketAddr,
    /// TLS connector for HTTPS checks, or the reason why it could not be created.
    tls_connector: Option<Result<TlsConnector, String>>,
    nat_table: Option<Arc<dyn NatTable>>,
}

impl HealthProber {
    /// Returns a prober for the servers of one service. `nat_table` is required for checks at the VIP.
    pub fn new(health_check: Arc<HealthCheck>, vip: SocketAddr, nat_table: Option<Arc<dyn NatTable>>) -> Self {
        let tls_connector = match &health_check.probe {
            HealthProbe::Https(_, verification) => {
                Some(ca::build_tls_client_config(verification).map(TlsConnector::from))
            }
            HealthProbe::Tcp | HealthProbe::Http(_) | HealthProbe::Agent => None,
        };
        Self { health_check, vip, tls_connector, nat_table }
    }

    pub fn health_check(&self) -> &HealthCheck {
        &self.health_check
    }

    pub async fn probe_server(&self, server: IpAddr) -> Result<(), ProbeError> {
        let timeout = self.health_check.timeout;
        tokio::time::timeout(timeout, self.probe_without_timeout(server))
            .await
            .unwrap_or(Err(ProbeError::TimedOut(timeout)))
    }

    async fn probe_without_timeout(&self, server: IpAddr) -> Result<(), ProbeError> {
        let connection = self.connect(server).await?;
        match (&self.health_check.probe, &self.tls_connector) {
            (HealthProbe::Tcp | HealthProbe::Agent, _) => Ok(()),
            (HealthProbe::Http(http), _) => self.send_http_request(connection, http, server).await,
            (HealthProbe::Https(http, _), Some(Ok(tls))) => {
                let certificate_name = self.expected_certificate_name(http, server)?;
                let connection = tls
                    .connect(certificate_name, connection)
                    .await
                    .map_err(|error| ProbeError::from_error(&error, ProbeError::TlsFailure))?;
                self.send_http_request(connection, http, server).await
            }
            (HealthProbe::Https(..), Some(Err(problem))) => Err(ProbeError::TlsFailure(problem.clone())),
            (HealthProbe::Https(..), None) => unreachable!("made with the prober"),
        }
    }

    fn target_port(&self) -> u16 {
        self.health_check.probe_port.unwrap_or(self.vip.port())
    }

    fn target_address(&self, server: IpAddr) -> SocketAddr {
        match self.health_check.probe_address {
            ProbeAddress::Vip => SocketAddr::new(self.vip.ip(), self.target_port()),
            ProbeAddress::Server => SocketAddr::new(server, self.target_port()),
        }
    }

    /// Adds the NAT entry of a check at the VIP. The source port of the entry is the port that the socket is bound to.
    fn add_nat_entry(
        &self,
        socket: &TcpSocket,
        server: IpAddr,
        nat_table: &Arc<dyn NatTable>,
    ) -> Result<NatEntryGuard, ProbeError> {
        let to_probe_error = |error: std::io::Error| ProbeError::from_error(&error, ProbeError::NetworkFailure);
        let vip = self.vip.ip();
        let unspecified_address = match (server, vip) {
            (IpAddr::V4(_), IpAddr::V4(_)) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            (IpAddr::V6(_), IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
            _ => {
                let family_mismatch = format!("server {server} at VIP {vip}: expected addresses of one family");
                return Err(ProbeError::LocalFailure(family_mismatch));
            }
        };
        socket.bind((unspecified_address, 0).into()).map_err(to_probe_error)?;
        let source_port = socket.local_addr().map_err(to_probe_error)?.port();
        let nat_path = HealthCheckNatPath { server_address: server, vip, server_port: self.target_port(), source_port };
        NatEntryGuard::add_entry(nat_path, nat_table).map_err(|error| ProbeError::LocalFailure(format!("{error:#}")))
    }

    fn expected_certificate_name(&self, http: &HttpProbe, server: IpAddr) -> Result<ServerName<'static>, ProbeError> {
        let Some(host) = &http.host else {
            return Ok(ServerName::from(self.target_address(server).ip()));
        };
        let tls_error = |error: &dyn Display| ProbeError::TlsFailure(format!("{host:?}: {error}"));
        let authority: Authority = host.parse().map_err(|error| tls_error(&error))?;
        // The authority contains an IPv6 address in brackets (RFC 3986, section 3.2.2).
        let host_name = authority.host().trim_start_matches('[').trim_end_matches(']');
        ServerName::try_from(host_name.to_owned()).map_err(|error| tls_error(&error))
    }

    /// Opens a connection that a reset will close, so that neither end keeps any state.
    async fn connect(&self, server: IpAddr) -> Result<CheckedServerConnection, ProbeError> {
        let to_probe_error = |error: std::io::Error| match error.kind() {
            ErrorKind::ConnectionRefused => ProbeError::ConnectionRefused,
            _ => ProbeError::from_error(&error, ProbeError::NetworkFailure),
        };
        let socket =
            if server.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }.map_err(to_probe_error)?;
        socket.set_zero_linger().map_err(to_probe_error)?;
        let nat_entry = match (&self.nat_table, self.health_check.probe_address) {
            (Some(nat_table), ProbeAddress::Vip) => Some(self.add_nat_entry(&socket, server, nat_table)?),
            _ => None,
        };
        CheckedServerConnection::connect(socket, SocketAddr::new(server, self.target_port()), nat_entry)
            .await
            .map_err(to_probe_error)
    }

    async fn send_http_request<C: AsyncRead + AsyncWrite + Unpin>(
        &self,
        connection: C,
        http: &HttpProbe,
        server: IpAddr,
    ) -> Result<(), ProbeError> {
        let to_probe_error = |error: hyper::Error| ProbeError::from_error(&error, ProbeError::HttpFailure);
        let target_address = self.target_address(server);
        let host_header = http.host.clone().unwrap_or_else(|| match target_address.port() {
            80 => target_address.to_string().trim_end_matches(":80").to_owned(),
            _ => target_address.to_string(),
        });
        let request = Request::get(&http.path_and_query)
            .header(HOST, host_header)
            .header(USER_AGENT, concat!("coreward/", env!("CARGO_PKG_VERSION")))
            .header(CONNECTION, "close")
            .body(Empty::<Bytes>::new())
            .map_err(|error| ProbeError::HttpFailure(error.to_string()))?;
        let (mut sender, driver) = http1::handshake(TokioIo::new(connection)).await.map_err(to_probe_error)?;
        let response_future = sender.send_request(request);
        tokio::pin!(response_future, driver);
        let response = tokio::select! {
            biased;
            response = &mut response_future => response,
            // The connection has ended, so the exchange returns the answer or the error at once.
            _ = &mut driver => response_future.await,
        };
        let status = response.map_err(to_probe_error)?.status();
        match http.expected_status.contains(status.as_u16()) {
            true => Ok(()),
            false => Err(ProbeError::UnexpectedStatus(status, http.expected_status.clone())),
        }
    }
}
