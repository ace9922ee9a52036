//! Who is connected: so many at a time. Who is connected and asks for nothing makes room for those who come, so that nobody is
//! kept out by connections that are opened and left alone.

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

use crate::limits::network;

/// While everybody is being answered: how often it is looked whether somebody is no more.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// All places.
pub(crate) struct Places {
    free: Arc<Semaphore>,
    taken: Mutex<Taken>,
}

/// Of one connection each, by its number.
#[derive(Default)]
struct Taken {
    by_number: BTreeMap<u64, Seat>,
    /// Grows: who has the lesser number came, or was answered, earlier.
    next: u64,
}

struct Seat {
    network: IpAddr,
    /// Requests that are being answered.
    asks: usize,
    /// When it was answered last, or came.
    idle_since: u64,
    leave: Arc<Notify>,
}

impl Taken {
    fn moment(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Whoever has asked for nothing for longest, of the network that has most of those.
    fn idlest(&self) -> Option<&Seat> {
        let idle = || self.by_number.values().filter(|seat| seat.asks == 0);
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        idle().for_each(|seat| *counts.entry(seat.network).or_default() += 1);
        idle().min_by_key(|seat| (std::cmp::Reverse(counts[&seat.network]), seat.idle_since))
    }
}

impl Places {
    /// So many.
    pub(crate) fn new(count: usize) -> Arc<Self> {
        Arc::new(Self { free: Arc::new(Semaphore::new(count)), taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock()
    }

    /// A place for somebody at this address, as soon as there is one.
    pub(crate) async fn take(self: &Arc<Self>, address: IpAddr) -> Place {
        let permit = loop {
            if let Ok(permit) = self.free.clone().try_acquire_owned() {
                break permit;
            }
            if let Some(idlest) = self.taken().idlest() {
                idlest.leave.notify_one();
            }
            if let Ok(Ok(permit)) = timeout(LOOK_INTERVAL, self.free.clone().acquire_owned()).await {
                break permit;
            }
        };
        let leave = Arc::new(Notify::new());
        let mut taken = self.taken();
        let number = taken.moment();
        let seat = Seat { network: network(address), asks: 0, idle_since: number, leave: leave.clone() };
        taken.by_number.insert(number, seat);
        drop(taken);
        Place { places: self.clone(), number, leave, _permit: permit }
    }
}

/// That of one connection.
pub(crate) struct Place {
    places: Arc<Places>,
    number: u64,
    leave: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    /// A request is being answered until what this gives is dropped.
    pub(crate) fn asks(self: &Arc<Self>) -> Asks {
        self.change(|seat, _| seat.asks += 1);
        Asks(self.clone())
    }

    /// When others need it and nothing is being answered.
    pub(crate) async fn is_needed(&self) {
        loop {
            self.leave.notified().await;
            if self.places.taken().by_number.get(&self.number).is_none_or(|seat| seat.asks == 0) {
                return;
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Seat, u64)) {
        let mut taken = self.places.taken();
        let moment = taken.moment();
        if let Some(seat) = taken.by_number.get_mut(&self.number) {
            change(seat, moment);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().by_number.remove(&self.number);
    }
}

/// A request that is being answered.
pub(crate) struct Asks(Arc<Place>);

impl Drop for Asks {
    fn drop(&mut self) {
        self.0.change(|seat, moment| (seat.asks, seat.idle_since) = (seat.asks - 1, moment));
    }
}

/// An answer's body: until it ends, the request is being answered.
pub(crate) struct Answer<B> {
    pub(crate) body: B,
    pub(crate) _asks: Asks,
}

impl<B: Body + Unpin> Body for Answer<B> {
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
