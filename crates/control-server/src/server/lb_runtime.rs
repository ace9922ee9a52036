//! Runtime for load balancers' connections, in a thread of its own. Agents and racks are served in order of arrival,
//! and a burst of them takes tens of milliseconds of CPU time. Tables and load balancers' messages must not wait behind
//! it. The kernel prefers a thread that mostly sleeps, so they do not wait on a single CPU either. Without TLS, a
//! connection's role is unknown at its start, so load balancers are served with the others.

use std::io;
use std::sync::Arc;

use anyhow::Context as _;
use coreward_tls::FleetRole;
use coreward_tls::acceptor::AcceptedConnection;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};

use super::{ControllerGrpcService, grpc_server_builder, size_limited_control_service};
use crate::server::leader_election::LeaderElection;

const LB_CONNECTION_QUEUE_LENGTH: usize = 64;

pub struct LbConnectionRuntime {
    runtime: Option<Runtime>,
    connection_sender: mpsc::Sender<io::Result<AcceptedConnection>>,
    server_task: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl LbConnectionRuntime {
    /// Starts the runtime's thread. Fails if the thread cannot be created.
    pub fn start(election: Arc<LeaderElection>) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("load-balancers")
            .enable_all()
            .build()
            .context("no thread for load balancers")?;
        let (connections, receiver) = mpsc::channel(LB_CONNECTION_QUEUE_LENGTH);
        let server =
            grpc_server_builder().add_service(size_limited_control_service(ControllerGrpcService { election }));
        let server_task = runtime.spawn(server.serve_with_incoming(ReceiverStream::new(receiver)));
        Ok(Self { runtime: Some(runtime), connection_sender: connections, server_task })
    }

    /// Moves connections whose certificates identify load balancers to this runtime. Returns the stream of all other
    /// connections.
    pub fn split_off_load_balancer_connections<S: Stream<Item = io::Result<AcceptedConnection>>>(
        &self,
        incoming_connections: S,
    ) -> impl Stream<Item = io::Result<AcceptedConnection>> + use<S> {
        let (connections, runtime_handle) = (self.connection_sender.clone(), self.runtime().handle().clone());
        incoming_connections.filter_map(move |incoming| match incoming {
            Ok(connection) if is_from_load_balancer(&connection) => {
                let peer = connection.caller().clone();
                if let Err(error) = move_connection_to_runtime(connection, &connections, &runtime_handle) {
                    tracing::warn!(
                        event = "handover-failed",
                        %peer,
                        error = format!("{error:#}"),
                        "the controller cannot begin to serve a load balancer that has connected: the load balancer \
                         reconnects"
                    );
                }
                None
            }
            other => Some(other),
        })
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it is there until this is dropped")
    }

    /// Waits until the runtime's server has ended, and returns its error.
    pub async fn wait_for_server_task(&mut self) -> anyhow::Result<()> {
        (&mut self.server_task).await?.context("load balancers are not served")
    }
}

impl Drop for LbConnectionRuntime {
    fn drop(&mut self) {
        // The runtime shuts down in the background, because asynchronous code must not wait for a thread to end.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn is_from_load_balancer(connection: &AcceptedConnection) -> bool {
    connection.caller().identity.as_ref().is_some_and(|identity| identity.role == FleetRole::Lb)
}

fn move_connection_to_runtime(
    connection: AcceptedConnection,
    connection_sender: &mpsc::Sender<io::Result<AcceptedConnection>>,
    runtime_handle: &Handle,
) -> anyhow::Result<()> {
    let moved_connection = connection.move_to_runtime(runtime_handle)?;
    connection_sender.try_send(Ok(moved_connection)).map_err(|error| anyhow::anyhow!("{error}"))
}
