//! The leader is without etcd: the other controllers are asked, one after the other, whether one of them was elected.

use std::net::SocketAddr;
use std::time::Duration;

use coreward_tls::connect::Connector;
use coreward_wire::v1;
use coreward_wire::v1::control_client::ControlClient;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::{CONNECT_TIMEOUT, connect, jittered};

/// Before each question: ten thousand agents ask some thousand times a second together.
const SEARCH_INTERVAL: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(10) };

/// Another controller was elected since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is without etcd, and {0} was elected")]
pub struct NewLeader(pub SocketAddr);

/// Questions under way; they end with this.
pub(super) struct Search {
    found: mpsc::Receiver<NewLeader>,
    task: AbortHandle,
}

impl Search {
    /// Asks these controllers for one that leads with etcd in a later term.
    pub fn begin(others: Vec<(SocketAddr, Connector)>, term: u64) -> Self {
        let (sender, found) = mpsc::channel(1);
        let task = tokio::spawn(async move {
            for (address, connector) in others.iter().cycle() {
                tokio::time::sleep(jittered(SEARCH_INTERVAL)).await;
                let asked = tokio::time::timeout(2 * CONNECT_TIMEOUT, leads(*address, connector.clone(), term)).await;
                if let Ok(Ok(true)) = asked {
                    let _ = sender.send(NewLeader(*address)).await;
                    return;
                }
            }
        });
        Self { found, task: task.abort_handle() }
    }

    pub async fn found(&mut self) -> NewLeader {
        match self.found.recv().await {
            Some(leader) => leader,
            // It was said before.
            None => std::future::pending().await,
        }
    }
}

impl Drop for Search {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Whether the controller leads with etcd, later than `term`.
async fn leads(address: SocketAddr, connector: Connector, term: u64) -> anyhow::Result<bool> {
    let reply = ControlClient::new(connect(address, connector).await?).leader(v1::LeaderRequest {}).await?.into_inner();
    Ok(reply.term > term && !reply.state.is_some_and(|state| state.without_etcd))
}
