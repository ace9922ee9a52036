//! Buffers of the requests that wait for a core.

use std::net::{Ipv4Addr, SocketAddrV4};

#[derive(Debug, Clone)]
pub struct Buffer {
    /// Address and port of the client.
    pub client: SocketAddrV4,
    /// Time of the request's arrival in nanoseconds.
    pub arrived_ns: u64,
    length: usize,
    data: Box<[u8]>,
}

impl Buffer {
    pub fn payload(&self) -> &[u8] {
        &self.data[..self.length]
    }
}

/// Pool with a fixed number of request buffers.
#[derive(Debug)]
pub struct BufferPool {
    all: Vec<Buffer>,
    free_handles: Vec<u32>,
}

impl BufferPool {
    /// Returns a pool with buffers for `count` requests of at most `bytes` bytes each.
    pub fn new(count: usize, bytes: usize) -> Self {
        let client = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
        let buffer = Buffer { client, arrived_ns: 0, length: 0, data: vec![0; bytes].into() };
        Self { all: vec![buffer; count], free_handles: (0..count as u32).collect() }
    }

    /// Copies a request into a free buffer, and returns the handle of the buffer. Panics when no buffer is free or the
    /// request is too long.
    #[inline]
    pub fn store(&mut self, client: SocketAddrV4, arrived: u64, payload: &[u8]) -> u32 {
        let handle = self.free_handles.pop().expect("a buffer for each request that waits, and one more");
        let buffer = &mut self.all[handle as usize];
        (buffer.client, buffer.arrived_ns, buffer.length) = (client, arrived, payload.len());
        buffer.data[..payload.len()].copy_from_slice(payload);
        handle
    }

    #[inline]
    pub fn get(&self, handle: u32) -> &Buffer {
        &self.all[handle as usize]
    }

    /// Makes the buffer with this handle available again.
    #[inline]
    pub fn release(&mut self, handle: u32) {
        self.free_handles.push(handle);
    }
}
