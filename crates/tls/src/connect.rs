//! The connecting side.

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

use crate::credentials::{CredentialError, Credentials, Files, client_without_certificate};
use crate::failure::Failure;
use crate::identity::Role;
use crate::io::Io;
use crate::tls::Tls;
use crate::verify::Host;

/// HTTP as ALPN has it.
const HTTP: &str = "http/1.1";

/// Connects to one address; what tonic asks for a connection.
#[derive(Debug, Clone)]
pub struct Connector {
    address: SocketAddr,
    tls: Option<(Arc<Tls>, &'static [Role])>,
}

impl Connector {
    /// `tls`: with that certificate, to somebody of one of those roles; otherwise nothing is encrypted, and anybody may be there.
    pub fn new(address: SocketAddr, tls: Option<(Arc<Tls>, &'static [Role])>) -> Self {
        Self { address, tls }
    }

    /// # Errors
    /// When nobody answers, or somebody whose certificate does not do.
    pub async fn connect(&self) -> io::Result<Io> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let Some((tls, roles)) = &self.tls else { return Ok(Io::Plain(stream)) };
        let config = tls.credentials().client(roles, Host::Any, "h2").map_err(io::Error::other)?;
        shake_hands(Arc::new(config), self.address.ip().into(), stream).await
    }
}

async fn shake_hands(config: Arc<ClientConfig>, host: ServerName<'static>, stream: TcpStream) -> io::Result<Io> {
    let connected = TlsConnector::from(config).connect(host, stream).await;
    // The words of the failure instead of the library's.
    let stream = connected.map_err(|error| io::Error::new(error.kind(), Failure::of(&error)))?;
    Ok(Io::Tls(Box::new(stream.into())))
}

/// How a command speaks to a controller's HTTP API beyond this host.
#[derive(Debug, Clone)]
pub struct HttpsConnector(Arc<ClientConfig>);

impl HttpsConnector {
    /// With the certificate of these files; the controller is to be of the same fleet.
    ///
    /// # Errors
    /// When a file cannot be used.
    pub fn with_certificate(files: &Files, host: Host) -> Result<Self, CredentialError> {
        let config = Credentials::load(files)?.client(&[Role::Controller], host, HTTP);
        let config = config.map_err(|error| CredentialError { key: "key", message: error.to_string() })?;
        Ok(Self(Arc::new(config)))
    }

    /// Without one, to a controller that an authority in this file has signed for: who asks has a token.
    ///
    /// # Errors
    /// When the file cannot be used.
    pub fn without_certificate(ca: &Path, host: Host) -> Result<Self, CredentialError> {
        Ok(Self(Arc::new(client_without_certificate(ca, &[Role::Controller], host, HTTP)?)))
    }

    /// `host`: name or address that was asked for, `address` one of its addresses.
    ///
    /// # Errors
    /// When nobody answers, or somebody whose certificate does not do.
    pub async fn connect(&self, host: &str, address: SocketAddr) -> io::Result<Io> {
        let wrong = |_| io::Error::other(format!("{host:?}: expected a host name or an address"));
        let host = ServerName::try_from(host.to_owned()).map_err(wrong)?;
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        shake_hands(self.0.clone(), host, stream).await
    }
}

impl tower_service::Service<Uri> for Connector {
    type Response = TokioIo<Io>;
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
