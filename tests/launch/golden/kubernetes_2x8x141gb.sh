#!/usr/bin/env bash
# rlpipe launch: run arithmetic-seed1 on kubernetes_2x8x141gb (kubernetes), 2 nodes x 8 GPUs, of which the run uses 2
cd /project || exit
kubectl apply -f - <<'END'
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: arithmetic-seed1
  namespace: training
  labels:
    app.kubernetes.io/name: rlpipe
spec:
  entrypoint: rlpipe train configs/demo/arithmetic.yaml run.directory=/shared/runs
    jit.cache_directory=/tmp/rlpipe-jit seed=1 ray.address=auto ray.nodes=2 --requeued
  submissionMode: K8sJobMode
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  backoffLimit: 3
  rayClusterSpec:
    rayVersion: 2.56.1
    headGroupSpec:
      rayStartParams:
        dashboard-host: 0.0.0.0
      template:
        spec:
          restartPolicy: Never
          securityContext:
            runAsNonRoot: true
            runAsUser: 1000
            fsGroup: 1000
          containers:
          - name: ray-head
            image: rlpipe:gpu
            volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
            - name: shared
              mountPath: /shared
            resources:
              limits:
                cpu: '128'
                memory: 1900G
                nvidia.com/gpu: '8'
              requests:
                cpu: '128'
                memory: 1900G
                nvidia.com/gpu: '8'
            env:
            - name: NCCL_SOCKET_IFNAME
              value: eth0
            - name: GLOO_SOCKET_IFNAME
              value: eth0
            - name: HF_HOME
              value: /shared/huggingface
            envFrom:
            - secretRef:
                name: rlpipe
          volumes:
          - name: shared-memory
            emptyDir:
              medium: Memory
              sizeLimit: 64G
          - name: shared
            persistentVolumeClaim:
              claimName: shared
          nodeSelector:
            nvidia.com/gpu.product: NVIDIA-H200
    workerGroupSpecs:
    - groupName: nodes
      replicas: 1
      minReplicas: 1
      maxReplicas: 1
      rayStartParams: {}
      template:
        spec:
          restartPolicy: Never
          securityContext:
            runAsNonRoot: true
            runAsUser: 1000
            fsGroup: 1000
          containers:
          - name: ray-worker
            image: rlpipe:gpu
            volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
            - name: shared
              mountPath: /shared
            resources:
              limits:
                cpu: '128'
                memory: 1900G
                nvidia.com/gpu: '8'
              requests:
                cpu: '128'
                memory: 1900G
                nvidia.com/gpu: '8'
            env:
            - name: NCCL_SOCKET_IFNAME
              value: eth0
            - name: GLOO_SOCKET_IFNAME
              value: eth0
            - name: HF_HOME
              value: /shared/huggingface
            envFrom:
            - secretRef:
                name: rlpipe
          volumes:
          - name: shared-memory
            emptyDir:
              medium: Memory
              sizeLimit: 64G
          - name: shared
            persistentVolumeClaim:
              claimName: shared
          nodeSelector:
            nvidia.com/gpu.product: NVIDIA-H200
END
