//! Limit of the number of connections. At the limit, idle connections are closed to make room for new ones.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Frame, SizeHint};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::limits::network_of_address;

/// Interval at which a new connection that waits for a slot searches again for an idle connection to close.
const IDLE_CONNECTION_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Fixed number of slots that limits a server's concurrent connections.
pub(crate) struct ConnectionSlots {
    free_slots: Arc<Semaphore>,
    connections: Mutex<ConnectionRegistry>,
}

#[derive(Default)]
struct ConnectionRegistry {
    connections_by_number: BTreeMap<u64, TrackedConnection>,
    /// Sequence number of the latest event. An event is the arrival of a connection or the end of an answer.
    last_sequence_number: u64,
}

struct TrackedConnection {
    client_network: IpAddr,
    active_request_count: usize,
    /// Sequence number of the event since which the connection is idle: its arrival, or the end of its last answer.
    idle_since_sequence_number: u64,
    close_signal: Arc<Notify>,
}

impl ConnectionRegistry {
    fn advance_sequence_number(&mut self) -> u64 {
        self.last_sequence_number += 1;
        self.last_sequence_number
    }

    /// Returns the connection to close: the longest idle one of the client network with the most idle connections.
    fn longest_idle_connection(&self) -> Option<&TrackedConnection> {
        let idle_connections =
            || self.connections_by_number.values().filter(|connection| connection.active_request_count == 0);
        let mut idle_connection_counts: HashMap<IpAddr, usize> = HashMap::new();
        idle_connections()
            .for_each(|connection| *idle_connection_counts.entry(connection.client_network).or_default() += 1);
        idle_connections().min_by_key(|connection| {
            (
                std::cmp::Reverse(idle_connection_counts[&connection.client_network]),
                connection.idle_since_sequence_number,
            )
        })
    }
}

impl ConnectionSlots {
    pub(crate) fn new(count: usize) -> Arc<Self> {
        Arc::new(Self { free_slots: Arc::new(Semaphore::new(count)), connections: Mutex::default() })
    }

    fn lock_connections(&self) -> MutexGuard<'_, ConnectionRegistry> {
        self.connections.lock()
    }

    /// Waits for a free slot, and occupies it with a connection from this client address.
    pub(crate) async fn acquire_slot(self: &Arc<Self>, client_address: IpAddr) -> ConnectionPermit {
        let permit = loop {
            if let Ok(permit) = self.free_slots.clone().try_acquire_owned() {
                break permit;
            }
            if let Some(idle_connection) = self.lock_connections().longest_idle_connection() {
                idle_connection.close_signal.notify_one();
            }
            if let Ok(Ok(permit)) =
                timeout(IDLE_CONNECTION_POLL_INTERVAL, self.free_slots.clone().acquire_owned()).await
            {
                break permit;
            }
        };
        let close_signal = Arc::new(Notify::new());
        let mut connections = self.lock_connections();
        let connection_number = connections.advance_sequence_number();
        let connection = TrackedConnection {
            client_network: network_of_address(client_address),
            active_request_count: 0,
            idle_since_sequence_number: connection_number,
            close_signal: close_signal.clone(),
        };
        connections.connections_by_number.insert(connection_number, connection);
        drop(connections);
        ConnectionPermit { slots: self.clone(), connection_number, close_signal, _permit: permit }
    }
}

pub(crate) struct ConnectionPermit {
    slots: Arc<ConnectionSlots>,
    connection_number: u64,
    close_signal: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
}

impl ConnectionPermit {
    /// Counts a request as active until the returned guard is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> ActiveRequestGuard {
        self.update_connection(|connection, _| connection.active_request_count += 1);
        ActiveRequestGuard(self.clone())
    }

    /// Waits until the connection is idle and a new connection needs its slot.
    pub(crate) async fn wait_until_slot_needed(&self) {
        loop {
            self.close_signal.notified().await;
            if self
                .slots
                .lock_connections()
                .connections_by_number
                .get(&self.connection_number)
                .is_none_or(|connection| connection.active_request_count == 0)
            {
                return;
            }
        }
    }

    fn update_connection(&self, change: impl FnOnce(&mut TrackedConnection, u64)) {
        let mut connections = self.slots.lock_connections();
        let sequence_number = connections.advance_sequence_number();
        if let Some(connection) = connections.connections_by_number.get_mut(&self.connection_number) {
            change(connection, sequence_number);
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.slots.lock_connections().connections_by_number.remove(&self.connection_number);
    }
}

/// Guard that counts a request as active until it is dropped.
pub(crate) struct ActiveRequestGuard(Arc<ConnectionPermit>);

impl Drop for ActiveRequestGuard {
    fn drop(&mut self) {
        self.0.update_connection(|connection, sequence_number| {
            (connection.active_request_count, connection.idle_since_sequence_number) =
                (connection.active_request_count - 1, sequence_number)
        });
    }
}

/// Body of an answer. The request counts as active until the body has been sent or dropped.
pub(crate) struct TrackedResponseBody<B> {
    pub(crate) body: B,
    pub(crate) _guard: ActiveRequestGuard,
}

impl<B: Body + Unpin> Body for TrackedResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
