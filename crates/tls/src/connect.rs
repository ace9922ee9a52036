//! The connecting side.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::failure::Failure;
use crate::identity::Role;
use crate::io::Io;
use crate::tls::Tls;

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
        let config = tls.material().client(roles).map_err(io::Error::other)?;
        let connector = TlsConnector::from(Arc::new(config));
        let connected = connector.connect(ServerName::from(self.address.ip()), stream).await;
        // The words of the failure instead of the library's.
        let stream = connected.map_err(|error| io::Error::new(error.kind(), Failure::of(&error)))?;
        Ok(Io::Tls(Box::new(stream.into())))
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
