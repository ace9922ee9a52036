//! Byte stream of a connection with or without TLS.

use std::io;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio_rustls::TlsStream;

use crate::failure::PeerConnectionFailure;

#[derive(Debug)]
pub enum PlainOrTlsStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl PlainOrTlsStream {
    /// Moves the socket to another Tokio runtime. Fails if its file descriptor cannot be duplicated.
    pub(crate) fn move_to_runtime(&mut self, runtime: &Handle) -> io::Result<()> {
        let stream = match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_mut().0,
        };
        let duplicated_socket = std::net::TcpStream::from(stream.as_fd().try_clone_to_owned()?);
        let _runtime_guard = runtime.enter();
        *stream = TcpStream::from_std(duplicated_socket)?;
        Ok(())
    }
}

/// Replaces the message of a TLS alert error by a description for the operator.
fn describe_tls_alert_error(error: io::Error) -> io::Error {
    match error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) {
        true => io::Error::new(error.kind(), PeerConnectionFailure::from_io_error(&error)),
        false => error,
    }
}

macro_rules! forward {
    ($self:ident, $io:ident => $call:expr) => {
        match $self.get_mut() {
            PlainOrTlsStream::Plain(stream) => {
                let $io = Pin::new(stream);
                $call
            }
            PlainOrTlsStream::Tls(stream) => {
                let $io = Pin::new(stream.as_mut());
                $call
            }
        }
    };
}

impl AsyncRead for PlainOrTlsStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let outcome = ready!(forward!(self, io => io.poll_read(context, buffer)));
        Poll::Ready(outcome.map_err(describe_tls_alert_error))
    }
}

impl AsyncWrite for PlainOrTlsStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = ready!(forward!(self, io => io.poll_write(context, bytes)));
        Poll::Ready(outcome.map_err(describe_tls_alert_error))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = ready!(forward!(self, io => io.poll_write_vectored(context, bytes)));
        Poll::Ready(outcome.map_err(describe_tls_alert_error))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, io => io.poll_flush(context)).map_err(describe_tls_alert_error)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, io => io.poll_shutdown(context)).map_err(describe_tls_alert_error)
    }
}
