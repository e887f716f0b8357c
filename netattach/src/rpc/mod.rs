//! Frames and messages between the CNI executable, the command line and the agent.
