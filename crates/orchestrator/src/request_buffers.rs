//! Buffers for the requests that wait for a core.

use std::net::{Ipv4Addr, SocketAddrV4};

#[derive(Debug, Clone)]
pub struct RequestBuffer {
    pub client: SocketAddrV4,
    /// Time at which the request arrived, in nanoseconds of the engine's clock.
    pub arrival_time_ns: u64,
    payload_length: usize,
    data: Box<[u8]>,
}

impl RequestBuffer {
    pub fn payload(&self) -> &[u8] {
        &self.data[..self.payload_length]
    }
}

/// Pool with a fixed number of request buffers.
#[derive(Debug)]
pub struct RequestBufferPool {
    buffers: Vec<RequestBuffer>,
    free_handles: Vec<u32>,
}

impl RequestBufferPool {
    /// Returns a pool with `buffer_count` buffers, each for a request of at most `buffer_bytes` bytes.
    pub fn new(buffer_count: usize, buffer_bytes: usize) -> Self {
        let client = SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0);
        let empty_buffer =
            RequestBuffer { client, arrival_time_ns: 0, payload_length: 0, data: vec![0; buffer_bytes].into() };
        Self { buffers: vec![empty_buffer; buffer_count], free_handles: (0..buffer_count as u32).collect() }
    }

    /// Copies a request into a free buffer and returns the buffer's handle. Panics when no buffer is free or the
    /// request is too long.
    #[inline]
    pub fn store_request(&mut self, client: SocketAddrV4, arrived_ns: u64, payload: &[u8]) -> u32 {
        let free_handle = self.free_handles.pop().expect("a buffer for each request that waits, and one more");
        let buffer = &mut self.buffers[free_handle as usize];
        (buffer.client, buffer.arrival_time_ns, buffer.payload_length) = (client, arrived_ns, payload.len());
        buffer.data[..payload.len()].copy_from_slice(payload);
        free_handle
    }

    #[inline]
    pub fn get(&self, handle: u32) -> &RequestBuffer {
        &self.buffers[handle as usize]
    }

    #[inline]
    pub fn release(&mut self, handle: u32) {
        self.free_handles.push(handle);
    }
}
