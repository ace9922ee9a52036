//! Connectors, which establish TLS connections to other daemons and to the controller's HTTP API.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::credentials::{CredentialError, Credentials, TlsCredentialFiles, client_config_without_certificate};
use crate::failure::PeerConnectionFailure;
use crate::identity::FleetRole;
use crate::io::PlainOrTlsStream;
use crate::tls::ReloadableTlsCredentials;
use crate::verify::ExpectedControllerHost;

const HTTP_1_1_ALPN: &str = "http/1.1";

/// Connector through which tonic connects to one address, with or without TLS.
#[derive(Debug, Clone)]
pub struct GrpcConnector {
    address: SocketAddr,
    tls_and_peer_roles: Option<(Arc<ReloadableTlsCredentials>, &'static [FleetRole])>,
}

impl GrpcConnector {
    /// Creates a connector that uses these credentials and accepts peers with these roles. With `None`, connections are
    /// not encrypted.
    pub fn new(
        address: SocketAddr,
        tls_and_peer_roles: Option<(Arc<ReloadableTlsCredentials>, &'static [FleetRole])>,
    ) -> Self {
        Self { address, tls_and_peer_roles }
    }

    /// Connects to the address, and verifies the peer if TLS is used.
    pub async fn connect(&self) -> io::Result<PlainOrTlsStream> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let Some((tls, roles)) = &self.tls_and_peer_roles else { return Ok(PlainOrTlsStream::Plain(stream)) };
        let config = tls
            .credentials()
            .build_client_config(roles, ExpectedControllerHost::Any, "h2")
            .map_err(io::Error::other)?;
        complete_handshake(Arc::new(config), self.address.ip().into(), stream).await
    }
}

async fn complete_handshake(
    config: Arc<ClientConfig>,
    host: ServerName<'static>,
    stream: TcpStream,
) -> io::Result<PlainOrTlsStream> {
    let connect_result = TlsConnector::from(config).connect(host, stream).await;
    // This error describes the failure for the operator, unlike that of the library.
    let stream =
        connect_result.map_err(|error| io::Error::new(error.kind(), PeerConnectionFailure::from_io_error(&error)))?;
    Ok(PlainOrTlsStream::Tls(Box::new(stream.into())))
}

/// TLS connector through which a command-line client connects to a controller's HTTP API.
#[derive(Debug, Clone)]
pub struct HttpsConnector(Arc<ClientConfig>);

impl HttpsConnector {
    /// Creates a connector that presents a client certificate. The controller must belong to the certificate's fleet.
    pub fn with_certificate(files: &TlsCredentialFiles, host: ExpectedControllerHost) -> Result<Self, CredentialError> {
        let config = Credentials::load(files)?.build_client_config(&[FleetRole::Controller], host, HTTP_1_1_ALPN);
        let config = config.map_err(|error| CredentialError { config_key: "key", message: error.to_string() })?;
        Ok(Self(Arc::new(config)))
    }

    /// Creates a connector without a certificate, for clients that have a token. `ca` is the file with the authorities
    /// that may sign the controller's certificate.
    pub fn without_certificate(ca: &Path, host: ExpectedControllerHost) -> Result<Self, CredentialError> {
        Ok(Self(Arc::new(client_config_without_certificate(ca, &[FleetRole::Controller], host, HTTP_1_1_ALPN)?)))
    }

    /// Connects to `address`, to which the user's `host` was resolved, and verifies the controller's certificate.
    pub async fn connect(&self, host: &str, address: SocketAddr) -> io::Result<PlainOrTlsStream> {
        let invalid_host_error = |_| io::Error::other(format!("{host:?}: expected a host name or an address"));
        let host = ServerName::try_from(host.to_owned()).map_err(invalid_host_error)?;
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        complete_handshake(self.0.clone(), host, stream).await
    }
}

impl tower_service::Service<Uri> for GrpcConnector {
    type Response = TokioIo<PlainOrTlsStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move { connector.connect().await.map(TokioIo::new) })
    }
}
