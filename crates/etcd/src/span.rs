//! How long a controller leads, by its own clock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use crate::clock::Moment;

/// Two ends: that of the lease, and a later one while etcd does not answer.
pub(crate) struct Span {
    lease: AtomicU64,
    without_etcd: AtomicU64,
    /// A write was sent, and no answer came.
    lost_an_answer: AtomicBool,
    /// Whether the lease is over and the other end is not.
    is_without_etcd: watch::Sender<bool>,
}

impl Span {
    /// A lease until then.
    pub fn until(lease: Moment) -> Self {
        Self {
            lease: AtomicU64::new(nanoseconds(lease)),
            without_etcd: AtomicU64::new(0),
            lost_an_answer: AtomicBool::new(false),
            is_without_etcd: watch::Sender::new(false),
        }
    }

    /// When the lease ends.
    pub fn lease(&self) -> Moment {
        moment(&self.lease)
    }

    /// The later of both ends.
    pub fn end(&self) -> Moment {
        self.lease().max(moment(&self.without_etcd))
    }

    /// It is over.
    pub fn close(&self) {
        self.lease.store(0, Ordering::Relaxed);
        self.without_etcd.store(0, Ordering::Relaxed);
    }

    /// The lease now ends then.
    pub fn renewed(&self, lease: Moment) {
        self.lease.store(nanoseconds(lease), Ordering::Relaxed);
        self.without_etcd.store(0, Ordering::Relaxed);
        self.look();
    }

    pub fn is_without_etcd(&self) -> bool {
        self.lease().left().is_zero() && !self.end().left().is_zero()
    }

    /// Returns when that is another than `told`: what it is now.
    pub async fn etcd_changed(&self, told: bool) -> bool {
        let mut changes = self.is_without_etcd.subscribe();
        // The sender is this one's own.
        changes.wait_for(|now| *now != told).await.map_or(told, |now| *now)
    }

    pub fn lose_an_answer(&self) {
        self.lost_an_answer.store(true, Ordering::Relaxed);
    }

    pub fn has_lost_an_answer(&self) -> bool {
        self.lost_an_answer.load(Ordering::Relaxed)
    }

    /// Waits for etcd's answer. As long as none comes the span goes on: each `pause` it is made to last for another `time`.
    /// `None`: it ended meanwhile, as this process stood still; another controller may have been elected.
    pub async fn outlast<T>(&self, answer: impl Future<Output = T>, pause: Duration, time: Duration) -> Option<T> {
        tokio::pin!(answer);
        loop {
            match tokio::time::timeout(pause, &mut answer).await {
                Ok(answer) => return Some(answer),
                Err(_) if self.end().left().is_zero() => return None,
                Err(_) => {
                    self.without_etcd.store(nanoseconds(Moment::now() + time), Ordering::Relaxed);
                    self.look();
                }
            }
        }
    }

    fn look(&self) {
        let now = self.is_without_etcd();
        let changed = self.is_without_etcd.send_if_modified(|before| std::mem::replace(before, now) != now);
        if changed && now {
            tracing::error!("etcd does not answer, and the lease is over: tables go on, nothing can be changed");
        } else if changed {
            tracing::info!("etcd answers again, and the lease is renewed");
        }
    }
}

fn nanoseconds(moment: Moment) -> u64 {
    moment.since_boot().as_nanos() as u64
}

fn moment(nanoseconds: &AtomicU64) -> Moment {
    Moment::at(Duration::from_nanos(nanoseconds.load(Ordering::Relaxed)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_secs(60);
    const PAUSE: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn the_span_goes_on_while_etcd_is_silent_and_ends_with_the_answer() {
        let span = Span::until(Moment::now() + Duration::from_millis(20));
        let answered = async {
            assert!(span.etcd_changed(false).await);
            assert!(span.is_without_etcd());
        };
        assert_eq!(span.outlast(answered, PAUSE, TIME).await, Some(()));
        span.renewed(Moment::now() + TIME);
        assert!(!span.is_without_etcd() && !span.etcd_changed(true).await);
        span.close();
        assert!(!span.is_without_etcd() && span.end().left().is_zero());
    }

    #[tokio::test]
    async fn a_process_that_stood_still_beyond_its_end_does_not_go_on() {
        let span = Span::until(Moment::now());
        assert_eq!(span.outlast(std::future::pending::<()>(), PAUSE, TIME).await, None);
        assert!(!span.is_without_etcd());
    }
}
