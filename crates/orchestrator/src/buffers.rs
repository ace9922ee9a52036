//! Buffers of the requests that wait for a core.

use std::net::{Ipv4Addr, SocketAddrV4};

#[derive(Debug, Clone)]
pub struct Buffer {
    /// Address and port of the client.
    pub client: SocketAddrV4,
    /// Arrival in nanoseconds.
    pub arrived: u64,
    pub length: usize,
    data: Box<[u8]>,
}

impl Buffer {
    pub fn payload(&self) -> &[u8] {
        &self.data[..self.length]
    }
}

/// A fixed number of buffers, one of which receives the next request.
#[derive(Debug)]
pub struct Buffers {
    all: Vec<Buffer>,
    free: Vec<u32>,
    incoming: u32,
}

impl Buffers {
    /// Buffers for `waiting` requests of at most `bytes` bytes, and for the next one.
    pub fn new(waiting: usize, bytes: usize) -> Self {
        let client = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
        // One byte more shows that a datagram is too long.
        let buffer = Buffer { client, arrived: 0, length: 0, data: vec![0; bytes + 1].into() };
        let count = waiting + 1;
        Self { all: vec![buffer; count], free: (1..count as u32).collect(), incoming: 0 }
    }

    /// Memory for the next request: one byte longer than a request can be.
    pub fn incoming(&mut self) -> &mut [u8] {
        &mut self.all[self.incoming as usize].data
    }

    /// Fills in the request that was received into [`incoming`](Self::incoming). Returns its handle.
    #[inline]
    pub fn received(&mut self, client: SocketAddrV4, arrived: u64, length: usize) -> u32 {
        let buffer = &mut self.all[self.incoming as usize];
        (buffer.client, buffer.arrived, buffer.length) = (client, arrived, length);
        self.incoming
    }

    /// Selects another buffer for the next request, because the one of the last request is in use.
    #[inline]
    pub fn next(&mut self) {
        self.incoming = self.free.pop().expect("a buffer for each request that waits, and one more");
    }

    #[inline]
    pub fn get(&self, handle: u32) -> &Buffer {
        &self.all[handle as usize]
    }

    /// Makes the buffer of a request available again.
    #[inline]
    pub fn release(&mut self, handle: u32) {
        self.free.push(handle);
    }
}
