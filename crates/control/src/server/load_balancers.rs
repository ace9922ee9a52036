//! One load balancer's stream: a hello, then what it sees, in; configuration and tables out.

use std::sync::Arc;

use coreward_wire::v1;
use tokio::sync::{mpsc, watch};
use tonic::{Status, Streaming};

use super::HELLO_TIMEOUT;
use super::shared::{Newest, Shared};

type Updates = mpsc::Sender<Result<v1::DataplaneUpdate, Status>>;

/// Serves the stream until it ends.
pub async fn serve(shared: Arc<Shared>, mut messages: Streaming<v1::LoadBalancerMessage>, updates: Updates) {
    let name = match hello(&mut messages).await {
        Ok(name) => name,
        Err(status) => {
            tracing::warn!("a load balancer was refused: {}", status.message());
            let _ = updates.send(Err(status)).await;
            return;
        }
    };
    if shared.controller().load_balancers.iter().any(|connected| connected.name == name) {
        tracing::warn!("load balancer {name} is connected already: expected a name of its own for each");
    }
    let session = shared.controller().load_balancers.hello(name.clone());
    tracing::info!("load balancer {name} has connected");
    tokio::select! {
        () = listen(&shared, session, &mut messages) => {}
        () = tell(shared.newest(), &updates) => {}
    }
    shared.controller().load_balancers.goodbye(session);
    tracing::info!("load balancer {name} has disconnected");
}

async fn hello(messages: &mut Streaming<v1::LoadBalancerMessage>) -> Result<String, Status> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, messages.message()).await;
    let message = first.map_err(|_| Status::deadline_exceeded("no hello came"))??.and_then(|message| message.message);
    match message {
        Some(v1::load_balancer_message::Message::Hello(hello)) => Ok(hello.name),
        _ => Err(Status::invalid_argument("a load balancer's first message: expected a hello")),
    }
}

/// What it sees, until it disconnects.
async fn listen(shared: &Shared, session: u64, messages: &mut Streaming<v1::LoadBalancerMessage>) {
    while let Ok(Some(message)) = messages.message().await {
        if let Some(v1::load_balancer_message::Message::State(state)) = message.message {
            let now = shared.now();
            shared.controller().load_balancers.state(session, state, now);
        }
    }
}

/// The newest configuration, then the newest tables, each time there is something new and room for it. Who is slow
/// misses tables, and gets the newest.
async fn tell(mut newest: watch::Receiver<Newest>, updates: &Updates) {
    use v1::dataplane_update::Update;
    let mut generation = None;
    loop {
        let Newest { configuration, tables } = newest.borrow_and_update().clone();
        if generation != Some(configuration.generation) {
            generation = Some(configuration.generation);
            let update = Update::Configuration((*configuration).clone());
            if updates.send(Ok(v1::DataplaneUpdate { update: Some(update) })).await.is_err() {
                return;
            }
        }
        for table in tables.iter() {
            let update = Update::Table(table.clone());
            if updates.send(Ok(v1::DataplaneUpdate { update: Some(update) })).await.is_err() {
                return;
            }
        }
        if newest.changed().await.is_err() {
            return;
        }
    }
}
