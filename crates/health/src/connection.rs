//! Connection to a checked server, with the NAT entry that directs its packets to the VIP.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};

use crate::nat_path::{HealthCheckNatPath, NatTable};

/// Connection to a checked server. The stream is dropped before the NAT entry, because the RST that closes the
/// connection needs the entry.
pub(crate) struct CheckedServerConnection {
    stream: TcpStream,
    _nat_entry: Option<NatEntryGuard>,
}

impl CheckedServerConnection {
    pub(crate) async fn connect(
        socket: TcpSocket,
        address: SocketAddr,
        nat_entry: Option<NatEntryGuard>,
    ) -> io::Result<Self> {
        // If this is cancelled, the future of `connect` is dropped with its socket before `nat_entry`.
        let stream = socket.connect(address).await?;
        Ok(Self { stream, _nat_entry: nat_entry })
    }
}

impl AsyncRead for CheckedServerConnection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for CheckedServerConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    /// Does nothing. After a FIN, closing would not send a reset, and the server might wait for an acknowledgement.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Guard of an entry in the NAT table. Dropping the guard removes the entry.
pub(crate) struct NatEntryGuard {
    nat_path: HealthCheckNatPath,
    nat_table: Arc<dyn NatTable>,
}

impl NatEntryGuard {
    pub(crate) fn add_entry(nat_path: HealthCheckNatPath, nat_table: &Arc<dyn NatTable>) -> anyhow::Result<Self> {
        nat_table.add_entry(&nat_path)?;
        Ok(Self { nat_path, nat_table: nat_table.clone() })
    }
}

impl Drop for NatEntryGuard {
    fn drop(&mut self) {
        self.nat_table.remove_entry(&self.nat_path);
    }
}
