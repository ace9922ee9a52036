//! HTTP client of the testbed's nginx, which has a persistent connection and queries which worker answers.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, SocketAddrV4, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::addresses::SERVICE_ADDRESS;
use crate::nginx::WORKER_IDENTITY_PATH;

/// Timeout for opening an HTTP connection, and for each response.
const HTTP_RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerIdentity {
    pub server_number: u16,
    pub worker_pid: u32,
}

/// Persistent HTTP connection from a client to a service.
#[derive(Debug)]
pub struct HttpConnection {
    stream: BufReader<TcpStream>,
}

impl HttpConnection {
    /// Opens a connection to the testbed's service, from `source` if given. Must be called inside the client's
    /// namespace. Fails when the connection is not accepted in time.
    pub fn open(source: Option<SocketAddrV4>) -> anyhow::Result<Self> {
        Self::open_to(SERVICE_ADDRESS.into(), source.map(Into::into))
    }

    /// Opens a connection to `address`, from `source` if given. Fails when the connection is not accepted in time.
    pub fn open_to(address: SocketAddr, source: Option<SocketAddr>) -> anyhow::Result<Self> {
        let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
        if let Some(source) = source {
            socket.set_reuse_address(true)?;
            socket.bind(&source.into()).with_context(|| format!("cannot bind to {source}"))?;
        }
        socket
            .connect_timeout(&address.into(), HTTP_RESPONSE_TIMEOUT)
            .with_context(|| format!("cannot connect to {address}"))?;
        socket.set_read_timeout(Some(HTTP_RESPONSE_TIMEOUT))?;
        socket.set_write_timeout(Some(HTTP_RESPONSE_TIMEOUT))?;
        Ok(Self { stream: BufReader::new(socket.into()) })
    }

    /// Sends a request and returns the identity of the worker that answers. Fails when the connection is broken or no
    /// response arrives in time.
    pub fn query_worker(&mut self) -> anyhow::Result<WorkerIdentity> {
        self.send_request(WORKER_IDENTITY_PATH)?;
        let (mut line, mut length) = (String::new(), 0);
        loop {
            line.clear();
            ensure!(self.stream.read_line(&mut line)? > 0, "the server closed the connection");
            if let Some(value) = line.strip_prefix("Content-Length: ") {
                length = value.trim().parse()?;
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        let body_text = String::from_utf8(body)?;
        let (server, worker) =
            body_text.trim().split_once(' ').with_context(|| format!("not a server's answer: {body_text:?}"))?;
        Ok(WorkerIdentity { server_number: server.parse()?, worker_pid: worker.parse()? })
    }

    /// Returns whether the connection's packets have TCP timestamps (struct tcp_info, tcpi_options; TCPI_OPT_TIMESTAMPS
    /// of linux/tcp.h). Fails when the kernel does not report tcp_info.
    pub fn has_timestamps(&self) -> anyhow::Result<bool> {
        use std::os::fd::AsRawFd as _;
        const TCPI_OPT_TIMESTAMPS: u8 = 1;
        let mut connection_info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
        let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
        let socket = self.stream.get_ref().as_raw_fd();
        // SAFETY: the kernel writes at most `length` bytes, all of them into `connection_info`.
        let result = unsafe {
            libc::getsockopt(
                socket,
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                connection_info.as_mut_ptr().cast(),
                &mut length,
            )
        };
        ensure!(result == 0, "TCP_INFO: {}", std::io::Error::last_os_error());
        // SAFETY: zeroes are a valid tcp_info, and so is what the kernel wrote.
        let connection_info = unsafe { connection_info.assume_init() };
        Ok(connection_info.tcpi_options & TCPI_OPT_TIMESTAMPS != 0)
    }

    /// Requests the file `path` and returns the stream, from which the caller reads the response. Fails when the
    /// connection is broken.
    pub fn request_file(mut self, path: &str) -> anyhow::Result<TcpStream> {
        self.send_request(path)?;
        Ok(self.stream.into_inner())
    }

    fn send_request(&mut self, path: &str) -> anyhow::Result<()> {
        // Write once, because further small segments would wait for acknowledgements (RFC 896).
        let request = format!("GET {path} HTTP/1.1\r\nHost: coreward\r\n\r\n");
        Ok(self.stream.get_mut().write_all(request.as_bytes())?)
    }
}
